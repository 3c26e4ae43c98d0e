// Executes the records that call operators.
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "worker/exec/alone.h"
#include "worker/exec/checking.h"
#include "worker/exec/executor.h"
#include "worker/exec/repetition.h"

namespace sing {

namespace {

uint64_t kind_of(uint32_t number, const Call& call) noexcept {
  uint64_t hash = mixed(1, number);
  for (const Operand& operand : call.operands) {
    hash = mixed(hash, operand.argument);
    for (const int64_t size : operand.geometry.sizes)
      hash = mixed(hash, static_cast<uint64_t>(size));
  }
  return hash;
}

}  // namespace

bool Executor::call(Reader& in) {
  const Reader record = in;
  const uint32_t number = in.get<uint32_t>();
  const uint16_t arguments = in.get<uint16_t>();
  const uint16_t returns = in.get<uint16_t>();
  if (!in.ok()) throw CorruptLog("a call without an operator");
  const Operator& op = state_.operators.at(number);
  call_.clear();
  op_ = number;
  const size_t before_arguments = in.remaining();
  arguments_ = Reader(in).get_bytes(before_arguments);
  std::string complaint = decoder_.parse(in, op, arguments, call_);
  arguments_ = arguments_.first(before_arguments - in.remaining());
  kind_ = kind_of(number, call_);
  parse_outputs(in, returns, is_request(), expected_);
  expect_end(in);
  if (complaint.empty() && returns != op.returns) {
    complaint = "internal: another number of results was expected";
  }
  bool taken = true;
  if (is_request() && reports_pending(taken)) {
    call_.clear();
    return taken;
  }
  before_.reset();
  if (is_request()) before_ = answers_.recorded(end_);
  if (before_ && before_->status != AnswerStatus::ok) before_.reset();

  answer_.clear();
  std::optional<Failure> failure;
  if (const auto cause = missing_operand()) {
    failure = {ErrorKind::lost_operand, position_, *cause, LostOperand(*cause).what()};
    // Reading a lost output reports the failure. A change in place leaves no such trace.
    const bool in_place = std::any_of(call_.operands.begin(), call_.operands.end(),
                                      [](const Operand& operand) { return operand.written; });
    if (!is_request() && !in_place) {
      skip_call(cause);
      call_.clear();
      return true;
    }
  } else {
    try {
      refuse_skipped();
      TORCH_CHECK(complaint.empty(), complaint);
      bool done = false;
      const auto perform_once = [&](bool again) {
        if (again) parse_again(record, op, arguments);
        done = perform_checked(op, is_request() ? &answer_ : nullptr);
      };
      with_room(perform_once, &op);
      if (!done) [[unlikely]] {
        call_.clear();
        return false;
      }
      finish_carefully();
    } catch (const EndOfRun&) {
      throw;
    } catch (...) {
      failure = failed(op.full_name, op.draws);
    }
  }
  if (failure) {
    const auto cause = shared_name(failure->operation);
    if (!is_request() || before_) fail(*failure);
    skip_call(cause);
    if (before_) {
      lose_recorded(state_, call_, expected_, before_->bytes, cause);
      ++state_.diverged;
    }
  }
  call_.clear();
  if (!is_request()) return true;
  if (failure) return report(*failure);
  return answers_.send(end_, AnswerStatus::ok, answer_.view());
}

// The operator has taken the operands of the first attempt from the stack.
void Executor::parse_again(Reader in, const Operator& op, uint16_t arguments) {
  stage_ = Stage::operands;
  Call before;
  std::swap(before, call_);
  in.get<uint32_t>();
  in.get<uint16_t>();
  in.get<uint16_t>();
  decoder_.parse(in, op, arguments, call_);
  for (size_t i = 0; i < call_.operands.size(); ++i) {
    call_.operands[i].fresh = before.operands[i].fresh;
  }
}

std::shared_ptr<const std::string> Executor::missing_operand() {
  for (const Operand& operand : call_.operands) {
    const Slot& slot = state_.storages.at(operand.id);
    const bool lost = slot.life == Slot::Life::lost;
    if ((!lost && !state_.stale(slot)) || operand.overwrites(slot.bytes)) continue;
    return lost ? slot.cause : shared_name(state_.pending->operation);
  }
  return nullptr;
}

// As in Note [Failures], the results of the current call are lost; what it should have changed in
// place is stale. Storages that this call used first hold no value, and are lost too.
void Executor::skip_call(const std::shared_ptr<const std::string>& cause) {
  for (const Operand& operand : call_.operands) {
    if (!operand.written) continue;
    Slot& slot = state_.storages.at(operand.id);
    if (slot.life == Slot::Life::lost) continue;
    // An empty storage has nothing to lose, except as an output that should have received values.
    if (slot.bytes == 0 && !operand.out) continue;
    if (operand.fresh || !(slot.in_memory() || slot.given_up)) {
      state_.storages.lose(operand.id, cause, slot.bytes);
    } else if (state_.pending) {
      slot.stale = state_.failures;
    }
  }
  if (!is_request()) lose_outputs(state_, expected_, cause);
}

// Returns false if the call waits for other sessions.
bool Executor::perform_checked(const Operator& op, Writer* answer) {
  const CallRecordView record{op, op_, expected_, arguments_, header_.flags};
  bool derived = false;
  if (splicing_ && position_ >= careful_until_) [[unlikely]] {
    if (splicing_->make_zeros(record, call_)) return true;
    derived = splicing_->derive(record, call_, determinism_.on());
    // A request that was answered before has to return what it did then.
    if (derived && answer && !before_) splicing_->expect(expected_);
    if (derived && splicing_->find(record, call_)) {
      splicing_->place_operands(call_);
      stage_ = Stage::results;
      splicing_->place_results(expected_);
      if (answer) describe(expected_, *answer);
      return true;
    }
    if (splicing_->lets_others()) return false;
    if (derived) {
      const auto outcome = splicing_->meet(record, call_);
      if (outcome == Rendezvous::Outcome::waits) return false;
      if (outcome == Rendezvous::Outcome::together) {
        perform_together(record);
        return true;
      }
    } else if (splicing_->waits()) {
      splicing_->end_waiting();
    }
  }
  perform_here(record, answer, derived);
  return true;
}

// A failure ends the process: it could not be undone for the other sessions.
void Executor::perform_together(const CallRecordView& record) noexcept {
  perform_here(record, nullptr, /*derived=*/true);
  splicing_->give(call_);
}

// `derived`: what its results are is known.
void Executor::perform_here(const CallRecordView& record, Writer* answer, bool derived) {
  const Operator& op = record.op;
  std::optional<Repetition> repetition;
  if (before_) repetition.emplace(state_, call_, before_->bytes);
  decoder_.materialise(call_, /*predicted=*/answer == nullptr);
  std::optional<WriteCheck> check;
  if (state_.limits.check_writes) check.emplace(state_, call_);
  if (op.draws && !state_.device.is_cpu()) [[unlikely]]
    state_.generators.mark();
  stage_ = Stage::kernel;
  perform(op, call_, expected_, header_.flags);
  stage_ = Stage::results;
  for (const Operand& operand : call_.operands) {
    if (!operand.rewrites) continue;
    state_.storages.note_part(state_.storages.at(operand.id), operand.offset(), operand.count());
  }
  if (check) check->compare(state_, op);
  if (call_.stack.size() != expected_.returns.size()) {
    TORCH_CHECK(false, "internal: another number of results was made");
  }
  if (repetition) {
    repetition->bind(expected_);
    check_results(answer);
    repetition->fit_operands();
    state_.diverged += repetition->diverged();
    if (derived && !repetition->diverged()) splicing_->note(record, call_);
    return;
  }
  if (answer) {
    bind_and_describe(state_, call_, expected_, *answer);
  } else {
    bind_predicted(state_, call_, expected_);
  }
  check_results(answer);
  if (derived) splicing_->note(record, call_);
}

void Executor::perform(const Operator& op, Call& call, const ExpectedReturns& expected,
                       uint8_t flags) {
  const Alone alone((flags & kRequest) == 0 && is_small(op, call, expected));
  // No graph is built (autograd is excluded), but some kernels check the mode.
  const c10::AutoGradMode gradients((flags & kGradients) != 0);
  const auto invoke = [&] {
    if (op.substitute) {
      op.substitute(call.stack);
    } else {
      op.handle->callBoxed(call.stack);
    }
  };
  bool inexact = op.unknown || !call.compounds.empty() || (op.inexact && !determinism_.on());
  if (determinism_.on()) [[unlikely]] {
    inexact |= !determinism_.call(op, call.stack, invoke);
  } else {
    invoke();
  }
  if (inexact && !state_.device.is_cpu()) [[unlikely]]
    state_.exactness.note_inexact();
}

// Checks the written operands: their storages are defined now, and an `out=` operand that was too
// small received another geometry, which is sent to the notebook.
void Executor::check_results(Writer* answer) {
  uint32_t changes = 0;
  size_t count_at = 0;
  if (answer) {
    count_at = answer->size();
    answer->put<uint32_t>(0);
  }
  for (const Operand& operand : call_.operands) {
    if (!operand.written) continue;
    if (operand.tensor.is_conj() && !(operand.geometry.flags & kConjugate)) {
      // A kernel (linalg_lu_solve) only marked its output as conjugate; the notebook's tensor has
      // no mark.
      operand.tensor._set_conj(false);
      operand.tensor.conj_physical_();
    }
    Slot& slot = state_.storages.at(operand.id);
    const bool whole = operand.overwrites(slot.bytes);  // judged by its size before the call
    if (!operand.rewrites) state_.storages.note_size(slot);
    if (whole || slot.filled < slot.bytes) Storages::revive(slot);
    if (operand.part) continue;  // the sparse tensor is described as a result
    if (operand.tensor.sizes() == c10::IntArrayRef(operand.geometry.sizes) &&
        operand.tensor.strides() == c10::IntArrayRef(operand.geometry.strides) &&
        operand.tensor.storage_offset() == operand.geometry.offset) {
      continue;
    }
    TORCH_CHECK(answer, "internal: the operator changed the geometry of its output");
    answer->put<uint16_t>(operand.argument);
    answer->put<uint16_t>(operand.element);
    answer->put<uint64_t>(slot.bytes);
    put_geometry(*answer, operand.tensor);
    ++changes;
  }
  if (!answer) return;
  answer->patch<uint32_t>(count_at, changes);
  TORCH_CHECK(answer->size() <= kAnswerRingBytes, "internal: more results than can be answered");
}

}  // namespace sing
