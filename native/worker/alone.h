// Small operators on software devices with several compute threads: one thread executes them.
//
// Note [Small operators]: MKL and oneDNN split a product of matrices of 16 rows among their
// threads, and torch a softmax of as many. That these meet takes longer than the work does, and far
// longer where the notebook's thread has the other core: it is taken away from it at each operator.
// The notebook needs some ten microseconds to write the next record, so an operator that one thread
// executes in less delays nobody.
//
// Replay must compute the same bytes, so the sizes of the operands decide, and not how busy the
// machine is. And these bytes are to be those of all threads together, as many kernels add up in
// another order when there are fewer: only products and softmaxes are treated so, of sizes with
// which they do not (tests/alone.cpp).
#pragma once

#include "worker/decode.h"
#include "worker/operators.h"

namespace sing {

bool is_small(const Operator& op, const Call& call) noexcept;

// While it lives, what this thread executes has no helpers.
class Alone {
 public:
  explicit Alone(bool really) noexcept;
  ~Alone();
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;

 private:
  int threads_ = 0;  // that it had; 0: as they were
};

}  // namespace sing
