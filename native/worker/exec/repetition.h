// A request that is executed again: its results get the geometry that was answered before.
//
// Note [Repetitions]: kernels that add in any order, other libraries' operators and other devices
// may give other values when a log is executed again, and with them other sizes (nonzero). The log
// after the request, and the notebook, have tensors of the sizes that were answered. So a result of
// another size is cut, or padded with zeros, which are valid indices. A sparse tensor cannot be cut
// without becoming inconsistent, so it is lost, as if its operator had failed. Both count in
// State::diverged. Nothing of that happens where the execution is exact.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "worker/exec/decode.h"
#include "worker/exec/outputs.h"

namespace sing {

class Repetition {
 public:
  // To be made before the operator is executed. `answer`: what the request was answered.
  Repetition(State& state, const Call& call, std::span<const std::byte> answer);

  // Binds the results. Throws CorruptLog if the answer is none of this request.
  void bind(const ExpectedReturns& expected);
  // Gives the operands that the operator has changed, or has not, the answered geometry.
  void fit_operands();
  // True if something had another size or value than before.
  bool diverged() const { return diverged_; }

 private:
  using Numbers = std::span<const Expected>;

  void output(Numbers numbers, const c10::IValue& result);
  void tensor(Numbers numbers, at::Tensor result, Tag tag);
  void compound(Numbers numbers, const c10::IValue& result);
  void place(const Expected& to, const at::Tensor& result);
  void place_alias(const Expected& to, const at::Tensor& result);
  bool is_bound(const at::Tensor& tensor) const;
  template <class T>
  void number(bool fits, T made);

  State& state_;
  const Call& call_;
  Reader in_;
  bool diverged_ = false;
  std::vector<uint64_t> bytes_before_;  // of the operands' storages
  std::vector<at::Tensor> bound_;
};

// Marks everything that the request was answered as lost: it cannot be computed again.
void lose_recorded(State& state, const Call& call, const ExpectedReturns& expected,
                   std::span<const std::byte> answer,
                   const std::shared_ptr<const std::string>& cause);

}  // namespace sing
