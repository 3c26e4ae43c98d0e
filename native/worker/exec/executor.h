// Executes records.
//
// Note [Failures]. Operators fail after the notebook has moved on. The first failure is kept and
// raised by the next request, which does nothing else. Until then, the notebook should find its
// tensors as if the program had stopped at the failure, as it would have on a CPU:
//   - what a failed or skipped call should have made is *lost*: using it is an error, later too;
//   - a call with a lost operand is skipped;
//   - what a skipped call should have changed in place is *stale* until the failure is raised, and
//     calls that use it are skipped as well; then it counts again, with the value that it had.
// So one bad batch costs neither the weights nor the optimizer's state. A lost or stale storage
// that is overwritten as a whole is good again.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "worker/exec/decode.h"
#include "worker/exec/outputs.h"
#include "worker/loop/answers.h"
#include "worker/state/state.h"

namespace sing {

// Whether a program's steps consist of such records. What is freed when Python pleases, or once and
// for all, tells nothing of them.
inline bool belongs_to_step(const RecordHeader& header) noexcept {
  switch (static_cast<RecordKind>(header.kind)) {
    case RecordKind::call:
    case RecordKind::write:
    case RecordKind::read:
    case RecordKind::resize:
    case RecordKind::synchronize:
      return true;
    default:
      return false;
  }
}

// Positions of records that killed their workers, and whether that was for want of host memory.
using Skipped = std::map<uint64_t, bool>;

class Executor {
 public:
  // `skip`: these fail instead.
  Executor(State& state, Answers& answers, Skipped skip)
      : state_(state), answers_(answers), skip_(std::move(skip)), decoder_(state) {}

  // Executes the record at `position`. Throws CorruptLog. Returns false if the run is to end
  // before the record's answer was taken: the record then counts as not executed.
  bool execute(uint64_t position, const RecordHeader& header, std::span<const std::byte> payload);
  // What the last record did, for `Steps`: the same for the same operator on the same shapes; 0 if
  // it is none that steps consist of.
  uint64_t kind() const noexcept { return kind_; }

 private:
  void define(Reader& in);
  void storages(Reader& in);
  bool call(Reader& in);
  void write(Reader& in);
  bool read(Reader& in);
  void resize(Reader& in);
  bool synchronize();
  bool generator(Reader& in);
  bool event(Reader& in);
  void settings(Reader& in);

  void perform(const Operator& op);
  void perform_checked(const Operator& op, Writer* answer);
  void check_results(Writer* answer);
  // The operator that a lost or stale operand of the call should have come from; null if none.
  std::shared_ptr<const std::string> missing_operand();
  bool overwrites(const Operand& operand, const Slot& slot) const;
  void skip_call(const std::shared_ptr<const std::string>& cause);
  // Throws if the record in hand is not to be executed.
  void refuse_skipped() const;
  void fail(Failure failure);
  bool reports_pending(bool& taken);
  bool is_request() const { return (header_.flags & kRequest) != 0; }
  void expect_request(bool request) const;

  State& state_;
  Answers& answers_;
  Skipped skip_;
  Decoder decoder_;
  // Of the record in hand.
  uint64_t position_ = 0;
  uint64_t end_ = 0;
  uint64_t kind_ = 0;
  RecordHeader header_{};
  Call call_;
  ExpectedReturns expected_;
  Writer answer_;
};

}  // namespace sing
