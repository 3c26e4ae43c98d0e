// Small operators on software devices with several compute threads: one thread executes them.
//
// Note [Small operators]: MKL splits a product of matrices of 16 rows among its threads, and torch
// does the same with a softmax of that size. Synchronizing these threads takes longer than the
// work, and far longer if the notebook's thread has the other core: that core is taken from it at
// each operator. The notebook needs about ten microseconds to write the next record, so an operator
// that one thread executes in little more than that causes no delay.
//
// Replay must compute the same bytes, so the sizes decide, and not the load of the machine. The
// bytes must also equal those of all threads together. With fewer threads, many kernels add in
// another order, or compute the last elements of each share in another way. So one thread executes
// only operators, with sizes, for which the results are the same (`Sharing` in ops/row.h,
// tests/worker/exec/alone.cpp). Attention would gain from it, but gives other bytes.
#pragma once

#include "worker/exec/decode.h"
#include "worker/exec/outputs.h"
#include "worker/operators/operators.h"

namespace sing {

// Makes this thread use `count` compute threads, as torch does by default with that many cores: if
// the number is set explicitly, torch has MKL use all of them even where one alone is faster.
void use_threads(int count);
// To be called after other code may have set torch's number of threads.
void let_mkl_choose() noexcept;

// True if one thread should execute the call. `expected` are the results of a call that is no
// request; the results of a request are not known.
bool is_small(const Operator& op, const Call& call, const ExpectedReturns& expected) noexcept;

// While an instance exists, operators of this thread run without helper threads.
class Alone {
 public:
  explicit Alone(bool really) noexcept;
  ~Alone();
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;

 private:
  int threads_ = 0;  // number of threads before; 0: not changed
};

}  // namespace sing
