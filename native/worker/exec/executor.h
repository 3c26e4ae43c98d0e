// Executes records.
//
// Note [Failures]. Operators fail after the notebook has continued. The first failure is kept and
// raised by the next request, which does nothing else. Until then, the notebook should find its
// tensors as if the program had stopped at the failure, as it would have on a CPU:
//   - the results of a failed or skipped call are *lost*: using them is an error, later too;
//   - a call with a lost operand is skipped;
//   - an operand that a skipped call should have changed in place is *stale* until the failure is
//     raised, and calls that use it are skipped as well; then it is valid again, with its old
//     value.
// So one bad batch costs neither the weights nor the optimizer's state. A lost or stale storage
// that is overwritten as a whole is valid again.
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

// True for records of which a program's steps consist. Others say nothing about steps: they free
// what Python's garbage collector finds, or occur only once.
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

// Positions of records that killed their workers, and whether the cause was lack of host memory.
using Skipped = std::map<uint64_t, bool>;

class Executor {
 public:
  // `skip`: records that fail instead of being executed.
  Executor(State& state, Answers& answers, Skipped skip)
      : state_(state), answers_(answers), skip_(std::move(skip)), decoder_(state) {}

  // Executes the record at `position`. Throws CorruptLog. Returns false if the run is to end before
  // the client has taken the record's answer: the record then counts as not executed.
  bool execute(uint64_t position, const RecordHeader& header, std::span<const std::byte> payload);
  // Fingerprint of the last record, for `Steps`: the same for the same operator on the same shapes;
  // 0 for a record that is not part of steps.
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
  // The operator that should have computed a lost or stale operand of the call; null if there is
  // none.
  std::shared_ptr<const std::string> missing_operand();
  bool overwrites(const Operand& operand, const Slot& slot) const;
  void skip_call(const std::shared_ptr<const std::string>& cause);
  // Throws if the current record is not to be executed.
  void refuse_skipped() const;
  void fail(Failure failure);
  bool reports_pending(bool& taken);
  bool is_request() const { return (header_.flags & kRequest) != 0; }
  void expect_request(bool request) const;

  State& state_;
  Answers& answers_;
  Skipped skip_;
  Decoder decoder_;
  // Of the current record.
  uint64_t position_ = 0;
  uint64_t end_ = 0;
  uint64_t kind_ = 0;
  RecordHeader header_{};
  Call call_;
  ExpectedReturns expected_;
  Writer answer_;
};

}  // namespace sing
