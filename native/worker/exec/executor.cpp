#include "worker/exec/executor.h"

#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <algorithm>

#include "worker/exec/alone.h"
#include "worker/exec/checking.h"
#include "worker/exec/origins.h"
#include "worker/exec/repetition.h"
#include "worker/loop/clock.h"

namespace sing {

namespace {

std::shared_ptr<const std::string> named(const std::string& name) {
  return std::make_shared<const std::string>(name);
}

// Checks that a record ends here: anything but padding after its payload is an error.
void expect_end(const Reader& in) {
  if (!in.ok() || in.remaining() >= 8) throw CorruptLog("a record of a wrong length");
}

// Order-dependent hash: the same parts in another order give another value.
uint64_t mixed(uint64_t hash, uint64_t part) noexcept { return (hash + part) * 0x9e3779b97f4a7c15; }

uint64_t kind_of(uint32_t number, const Call& call) noexcept {
  uint64_t hash = mixed(1, number);
  for (const Operand& operand : call.operands) {
    hash = mixed(hash, operand.argument);
    for (const int64_t size : operand.geometry.sizes)
      hash = mixed(hash, static_cast<uint64_t>(size));
  }
  return hash;
}

uint8_t flags_of(uint8_t kind) noexcept {
  switch (static_cast<RecordKind>(kind)) {
    case RecordKind::write:
      return kRequest | kNamed;
    case RecordKind::read:
      return kRequest | kNamed | kLast;
    default:
      return kRequest | kGradients;
  }
}

struct Range {
  uint32_t id = 0;
  uint64_t offset = 0;
  uint64_t count = 0;
};

Range get_range(Reader& in) {
  Range range;
  range.id = in.get<uint32_t>();
  in.get<uint32_t>();
  range.offset = in.get<uint64_t>();
  range.count = in.get<uint64_t>();
  return range;
}

void check_range(const Range& range, const Slot& slot) {
  if (range.offset > slot.bytes || range.count > slot.bytes - range.offset) {
    throw CorruptLog("a transfer reaches beyond its storage");
  }
}

}  // namespace

bool Executor::execute(uint64_t position, const RecordHeader& header,
                       std::span<const std::byte> payload) {
  position_ = position;
  end_ = position + header.bytes;
  header_ = header;
  kind_ = belongs_to_step(header) ? mixed(header.kind, header.bytes) : 0;
  state_.storages.begin_record(position);
  if ((header.flags & ~flags_of(header.kind)) != 0) throw CorruptLog("a record with unknown flags");
  Reader in(payload);
  switch (static_cast<RecordKind>(header.kind)) {
    case RecordKind::define:
      define(in);
      return true;
    case RecordKind::storages:
      storages(in);
      return true;
    case RecordKind::call:
      return call(in);
    case RecordKind::write:
      write(in);
      return true;
    case RecordKind::read:
      return read(in);
    case RecordKind::resize:
      resize(in);
      return true;
    case RecordKind::synchronize:
      expect_end(in);
      return synchronize();
    case RecordKind::generator:
      return generator(in);
    case RecordKind::event:
      return event(in);
    case RecordKind::settings:
      settings(in);
      return true;
    case RecordKind::answered:
      expect_request(false);
      in.get<uint64_t>();
      get_recorded(in);  // used when the request was executed
      expect_end(in);
      return true;
  }
  throw CorruptLog("a record of an unknown kind");
}

void Executor::expect_request(bool request) const {
  if (is_request() != request) throw CorruptLog("a record that is, or is not, a request");
}

void Executor::refuse_skipped() const {
  if (memory_failures_.has(position_)) [[unlikely]]
    throw BeyondGrant({__func__, __FILE__, __LINE__},
                      "out of device memory, as when it was executed before");
  const auto found = skip_.find(position_);
  if (found == skip_.end()) return;
  const auto& [why, starved] = found->second;
  if (starved) throw OutOfHostMemory(why);
  throw std::runtime_error(why);
}

void Executor::finish_carefully() const {
  if (position_ < careful_until_) [[unlikely]]
    wait_for_device(state_.device);
}

template <class Work>
void Executor::with_room(const Work& work, const Operator* op) {
  stage_ = Stage::operands;
  try {
    return work(false);
  } catch (const EndOfRun&) {
    throw;
  } catch (...) {
    if (state_.device.is_cpu() || !lacks_device_memory()) throw;
    throw_if_lost(state_.device, position_, op ? op->full_name : std::string());
    const bool repeat = may_repeat(op);
    if (stage_ == Stage::kernel && op->draws) state_.generators.rewind();
    if (!repeat) throw;
  }
  make_room();
  try {
    work(true);
  } catch (...) {
    if (stage_ == Stage::kernel && op->draws) state_.generators.rewind();
    throw;
  }
}

bool Executor::may_repeat(const Operator* op) const {
  if (stage_ == Stage::operands) return true;
  return stage_ == Stage::kernel && !op->unknown &&
         std::none_of(call_.operands.begin(), call_.operands.end(),
                      [](const Operand& operand) { return operand.changed; });
}

void Executor::make_room() {
  c10::getDeviceAllocator(state_.device.type())->emptyCache();
  if (room_) room_();
}

Failure Executor::failed(const std::string& operation, bool draws) {
  Failure failure = describe_exception(state_.device, position_, operation);
  const bool memory =
      failure.kind == ErrorKind::out_of_memory || failure.kind == ErrorKind::out_of_host_memory;
  if (!memory || memory_failures_.has(position_) || skip_.contains(position_)) return failure;
  const bool again = !state_.storages.enforced();
  if (again && !memory_failures_.may_have(position_)) throw NoRoom(failure.message);
  bool partly = draws && state_.device.is_cpu();  // its generators are not put back
  for (const Operand& operand : call_.operands) {
    partly |= operand.changed && stage_ != Stage::operands;
    // As when it fails again, without its operands.
    Slot& slot = state_.storages.at(operand.id);
    if (operand.fresh && slot.storage && slot.life == Slot::Life::live) {
      state_.storages.allocate(operand.id, slot.bytes);
    }
  }
  if (!memory_failures_.add(position_) || partly) state_.exactness.note_inexact();
  return failure;
}

void Executor::fail(Failure failure) {
  if (state_.pending) return;
  state_.pending = std::move(failure);
  ++state_.failures;
}

// A fault of the device that was not noticed yet may come first.
bool Executor::report(const Failure& failure) {
  if (answers_.wanted(end_)) wait_for_device(state_.device);
  return answers_.send(end_, failure);
}

// Returns true if the request has to report an earlier failure; `taken` is then the return value of
// the request. A request that succeeded when it was executed before reports nothing: the failure
// occurred only now, and the next request that a client waits for reports it.
bool Executor::reports_pending(bool& taken) {
  if (!state_.pending) return false;
  const auto before = answers_.recorded(end_);
  if (before ? before->status == AnswerStatus::ok : !answers_.wanted(end_)) return false;
  const Failure failure = std::move(*state_.pending);
  state_.pending.reset();
  taken = report(failure);
  return true;
}

// ---------------------------------------------------------------- simple records

void Executor::define(Reader& in) {
  expect_request(false);
  const uint32_t number = in.get<uint32_t>();
  std::string name(in.get_string());
  std::string overload(in.get_string());
  constexpr size_t kOriginBytes = 12;  // at least; padding is shorter
  const Origin origin = in.remaining() >= kOriginBytes ? get_origin(in) : Origin();
  expect_end(in);
  if (name.empty()) throw CorruptLog("an operator without a name");
  if (!origin.empty() && !state_.limits.allowed) import_origin(name, overload, origin);
  // A postponed call knows its operator by the number.
  if (splicing_ && state_.operators.find(number)) state_.storages.settle();
  state_.operators.define(number, std::move(name), std::move(overload));
}

void Executor::storages(Reader& in) {
  expect_request(false);
  const uint32_t count = in.get_count(0);
  in.get<uint32_t>();
  if (in.remaining() / sizeof(StorageEntry) < count) throw CorruptLog("a short list of storages");
  for (uint32_t i = 0; i < count; ++i) {
    const auto entry = in.get<StorageEntry>();
    if (entry.action == static_cast<uint32_t>(StorageAction::allocate)) {
      state_.storages.allocate(entry.id, entry.bytes);
    } else if (entry.action == static_cast<uint32_t>(StorageAction::free)) {
      state_.storages.free(entry.id);
    } else {
      throw CorruptLog("an unknown action on a storage");
    }
  }
  expect_end(in);
}

ContentName Executor::get_name(Reader& in) const {
  return (header_.flags & kNamed) != 0 ? in.get<ContentName>() : ContentName();
}

void Executor::write(Reader& in) {
  expect_request(false);
  const Range range = get_range(in);
  const ContentName name = get_name(in);
  const auto bytes = in.get_bytes(range.count);
  expect_end(in);
  Slot& slot = state_.storages.at(range.id);
  check_range(range, slot);
  if (state_.stale(slot) && range.count != slot.bytes) return;
  try {
    refuse_skipped();
    with_room([&](bool) { state_.storages.write(slot, range.offset, bytes, name); });
    finish_carefully();
  } catch (const EndOfRun&) {
    throw;
  } catch (...) {
    Failure failure = failed("a copy to the device");
    state_.storages.lose(range.id, named(failure.operation), slot.bytes);
    fail(std::move(failure));
  }
}

bool Executor::read(Reader& in) {
  expect_request(true);
  const Range range = get_range(in);
  const ContentName name = get_name(in);
  expect_end(in);
  Slot& slot = state_.storages.at(range.id);
  check_range(range, slot);
  bool taken = true;
  if (reports_pending(taken)) return taken;
  // If the storage has no memory yet, it takes it here, which decides what a later failure leaves
  // of it (Note [Failures]). So this also happens during replay, when the client does not wait.
  const bool whole = range.offset == 0 && range.count == slot.bytes;
  const auto vacate = [&] {
    if ((header_.flags & kLast) != 0) state_.storages.vacate(range.id);
  };
  if (slot.in_memory() && !answers_.wanted(end_)) {
    if (whole) state_.storages.note_read(slot, name);
    vacate();
    return true;
  }
  if (slot.life == Slot::Life::lost) {
    const std::string message = "this tensor was never computed: " + *slot.cause + " failed";
    return report({ErrorKind::lost_operand, position_, *slot.cause, message});
  }
  try {
    refuse_skipped();
    with_room([&](bool) { state_.storages.use(slot); });
    finish_carefully();
    if (whole) state_.storages.note_read(slot, name);
  } catch (const EndOfRun&) {
    throw;
  } catch (...) {
    return report(failed("a copy from the device"));
  }
  taken = answers_.send(end_, AnswerStatus::ok, range.count,
                        [&](uint64_t offset, std::span<std::byte> into) {
                          state_.storages.read(slot, range.offset + offset, into);
                        });
  if (taken) vacate();
  return taken;
}

void Executor::resize(Reader& in) {
  expect_request(false);
  const uint32_t id = in.get<uint32_t>();
  in.get<uint32_t>();
  const uint64_t bytes = in.get<uint64_t>();
  expect_end(in);
  state_.storages.at(id);
  try {
    refuse_skipped();
    with_room([&](bool) { state_.storages.resize(id, bytes); });
    finish_carefully();
  } catch (const EndOfRun&) {
    throw;
  } catch (...) {
    // The notebook's tensors already have the new size.
    Failure failure = failed("a resize of a storage");
    state_.storages.lose(id, named(failure.operation), bytes);
    fail(std::move(failure));
  }
}

bool Executor::synchronize() {
  expect_request(true);
  bool taken = true;
  if (reports_pending(taken)) return taken;
  wait_for_operators(state_.device);
  return answers_.send(end_, AnswerStatus::ok, {});
}

bool Executor::generator(Reader& in) {
  const uint32_t number = in.get<uint32_t>();
  const auto action = in.get<GeneratorAction>();
  in.get_bytes(3);
  const bool request = action == GeneratorAction::get_state;
  expect_request(request);
  bool taken = true;
  if (request && reports_pending(taken)) {
    expect_end(in);
    return taken;
  }
  Generators& generators = state_.generators;
  try {
    switch (action) {
      case GeneratorAction::seed: {
        const auto seed = in.get<uint64_t>();
        expect_end(in);
        generators.seed(number, seed);
        return true;
      }
      case GeneratorAction::get_state: {
        expect_end(in);
        const auto state = generators.state(number);
        return answers_.send(end_, AnswerStatus::ok, state);
      }
      case GeneratorAction::set_state: {
        const auto bytes = in.get_bytes(in.get<uint64_t>());
        expect_end(in);
        generators.set_state(number, bytes);
        return true;
      }
      case GeneratorAction::free:
        expect_end(in);
        generators.free(number);
        return true;
      case GeneratorAction::copy: {
        const auto source = in.get<uint32_t>();
        expect_end(in);
        generators.copy(number, source);
        return true;
      }
    }
  } catch (const EndOfRun&) {
    throw;
  } catch (...) {
    Failure failure = describe_exception(state_.device, position_, "a random number generator");
    if (request) return report(failure);
    fail(std::move(failure));
    return true;
  }
  throw CorruptLog("an unknown action on a generator");
}

// A software device has done all earlier work here. On another one, an event shows when it is done;
// it is translated to the host's clock where a time is to survive a migration to another device.
bool Executor::event(Reader& in) {
  const uint32_t number = in.get<uint32_t>();
  const auto action = in.get<EventAction>();
  in.get_bytes(3);
  const uint32_t other = action == EventAction::elapsed ? in.get<uint32_t>() : 0;
  expect_end(in);
  expect_request(action == EventAction::elapsed);
  switch (action) {
    case EventAction::record:
      if (state_.events.size() >= State::kEventsMax) throw CorruptLog("too many events");
      state_.events[number] =
          state_.time ? state_.time->stamp() : Stamp{static_cast<int64_t>(monotonic_ns()), {}, {}};
      return true;
    case EventAction::free:
      state_.events.erase(number);
      return true;
    case EventAction::elapsed: {
      bool taken = true;
      if (reports_pending(taken)) return taken;
      const auto from = state_.events.find(number), to = state_.events.find(other);
      if (from == state_.events.end() || to == state_.events.end()) {
        return report({ErrorKind::runtime, position_, "an event",
                       "Both events must be recorded before calculating elapsed time."});
      }
      const double elapsed = elapsed_ms(from->second, to->second);
      return answers_.send(end_, AnswerStatus::ok, std::as_bytes(std::span(&elapsed, 1)));
    }
  }
  throw CorruptLog("an unknown action on an event");
}

void Executor::settings(Reader& in) {
  expect_request(false);
  const Settings values = get_settings(in);
  expect_end(in);
  settings_change();
  state_.settings = values;
  determinism_.apply(state_.settings);
}

void Executor::settings_change() {
  if (!splicing_) return;
  splicing_->forget_settings();
  state_.storages.settle();
}

// ---------------------------------------------------------------- calls

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
    const auto cause = named(failure->operation);
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
    return lost ? slot.cause : named(state_.pending->operation);
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
