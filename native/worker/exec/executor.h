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
//
// Note [Room]: a GPU may lack memory although it was granted: fragments, caches of other workers, a
// process outside. Then this worker gives back its cache, asks the agent (`room`) to make the
// others give back theirs, and executes the record once more. Not if the first attempt may have
// changed something: an operand, or what a library keeps. Generators are put back to where they
// were.
#pragma once

#include <c10/util/FunctionRef.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "worker/exec/decode.h"
#include "worker/exec/determinism.h"
#include "worker/exec/outputs.h"
#include "worker/loop/answers.h"
#include "worker/replicas/splicing.h"
#include "worker/state/memory_failures.h"
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

// Order-dependent hash: the same parts in another order give another value.
inline uint64_t mixed(uint64_t hash, uint64_t part) noexcept {
  return (hash + part) * 0x9e3779b97f4a7c15;
}

// Why a record is not executed again: it ended the workers that executed it.
struct Skip {
  std::string why;       // text of the error that the notebook gets
  bool starved = false;  // for lack of host memory
};

// By the positions of the records.
using Skipped = std::map<uint64_t, Skip>;

class Executor : private Postponed::Performer {
 public:
  // `skip`: records that fail instead of being executed. `careful_until`: see finish_carefully().
  // `room`: see Note [Room].
  Executor(State& state, Answers& answers, MemoryFailures& memory_failures, Skipped skip = {},
           uint64_t careful_until = 0, std::function<void()> room = {})
      : state_(state),
        answers_(answers),
        memory_failures_(memory_failures),
        skip_(std::move(skip)),
        careful_until_(careful_until),
        room_(std::move(room)),
        decoder_(state) {
    if (state.storages.replicas()) {
      splicing_.emplace(state, static_cast<Postponed::Performer&>(*this));
    }
  }

  // Executes the record at `position`. Throws CorruptLog. Returns false if the record counts as not
  // executed: the run is to end before the client has taken its answer, or waits() is true now.
  bool execute(uint64_t position, const RecordHeader& header, std::span<const std::byte> payload);
  // Around any number of records: settings and generators of the process are this session's.
  void enter() {
    determinism_.enter(state_.settings);
    state_.generators.enter();
  }
  void leave() { state_.generators.leave(); }
  // See Note [Deterministic recovery].
  bool deterministic() const noexcept { return determinism_.on(); }
  void set_deterministic(bool on) {
    settings_change();
    determinism_.set(on, state_.settings);
  }
  // In a seat: true if the next record waits for other sessions; see Note [Rendezvous].
  bool waits() const noexcept { return splicing_ && splicing_->waits(); }
  // True if it must be executed before anything else is done.
  bool given() const { return splicing_ && splicing_->given(); }
  // True if the turn is to continue with it.
  bool ready() const { return !splicing_ || splicing_->ready(); }
  void end_waiting() noexcept {
    if (waits()) splicing_->end_waiting();
  }
  // Fingerprint of the last record, for `Steps`: the same for the same operator on the same shapes;
  // 0 for a record that is not part of steps.
  uint64_t kind() const noexcept { return kind_; }

 private:
  void define(Reader& in);
  void storages(Reader& in);
  bool call(Reader& in);
  ContentName get_name(Reader& in) const;
  void write(Reader& in);
  bool read(Reader& in);
  void resize(Reader& in);
  bool synchronize();
  bool generator(Reader& in);
  bool event(Reader& in);
  void settings(Reader& in);
  // To be called before torch's settings change.
  void settings_change();

  // Does the work of a record, and once more with more memory: see Note [Room].
  void with_room(c10::function_ref<void(bool again)> work, const Operator* op = nullptr);
  bool may_repeat(const Operator* op) const;
  void make_room();
  void parse_again(Reader in, const Operator& op, uint16_t arguments);
  // Describes the exception that is being handled. See Note [Memory failures].
  // `draws`: the operator may have drawn random numbers.
  Failure failed(const std::string& operation, bool draws = false);
  void perform(const Operator& op, Call& call, const ExpectedReturns& expected,
               uint8_t flags) override;
  bool perform_checked(const Operator& op, Writer* answer);
  void perform_here(const CallRecordView& record, Writer* answer, bool derived);
  void perform_together(const CallRecordView& record) noexcept;
  void check_results(Writer* answer);
  // The operator that should have computed a lost or stale operand of the call; null if there is
  // none.
  std::shared_ptr<const std::string> missing_operand();
  void skip_call(const std::shared_ptr<const std::string>& cause);
  // Throws if the current record is not to be executed, or is to fail again.
  void refuse_skipped() const;
  // After an operator: below the position `careful_until` of the log, waits until the device has
  // executed it, so that a device that is lost names the record that is to blame.
  void finish_carefully() const;
  void fail(Failure failure);
  // Answers the current request with a failure; returns as Answers::send() does.
  bool report(const Failure& failure);
  bool reports_pending(bool& taken);
  bool is_request() const { return (header_.flags & kRequest) != 0; }
  void expect_request(bool request) const;

  State& state_;
  Answers& answers_;
  MemoryFailures& memory_failures_;
  Skipped skip_;
  uint64_t careful_until_;
  std::function<void()> room_;
  Decoder decoder_;
  Determinism determinism_;
  std::optional<Splicing> splicing_;  // in a seat
  // Of the current record.
  enum class Stage : uint8_t { operands, kernel, results } stage_ = Stage::operands;
  uint64_t position_ = 0;
  uint64_t end_ = 0;
  uint64_t kind_ = 0;
  uint32_t op_ = 0;  // of a call
  RecordHeader header_{};
  Call call_;
  std::span<const std::byte> arguments_;  // as they are encoded
  ExpectedReturns expected_;
  Writer answer_;
  std::optional<Recorded> before_;  // of a request that succeeded when it was executed before
};

}  // namespace sing
