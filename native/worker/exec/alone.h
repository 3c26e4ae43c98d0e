// Small operators on software devices with several compute threads: one thread executes them.
//
// Note [Small operators]: MKL splits a product of matrices of 16 rows among its threads, and torch
// a softmax of as many. That these meet takes longer than the work does, and far longer where the
// notebook's thread has the other core: it is taken away from it at each operator. The notebook
// needs some ten microseconds to write the next record, so an operator that one thread executes in
// little more delays nobody.
//
// Replay must compute the same bytes, so the sizes decide, and not how busy the machine is. And
// these bytes are to be those of all threads together, as many kernels add up in another order when
// there are fewer, or compute the last elements of each share in another way: only operators are
// treated so that do not, with sizes with which they do not (`Sharing` in operators.h,
// tests/alone.cpp). Attention would be worth it, but gives other bytes.
#pragma once

#include "worker/exec/decode.h"
#include "worker/exec/operators.h"
#include "worker/exec/outputs.h"

namespace sing {

// Executes what follows in this thread with so many, as torch does by default with as many cores:
// with a number that it is told, torch has MKL use all of them even where one alone is faster.
void use_threads(int count);
// To be called after something else may have told torch a number.
void let_mkl_choose() noexcept;

// `expected` are the results of a call that nobody waits for; what a request will give is not
// known.
bool is_small(const Operator& op, const Call& call, const ExpectedReturns& expected) noexcept;

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
