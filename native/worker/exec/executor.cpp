#include "worker/exec/executor.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>

namespace sing {

namespace {

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

void Executor::with_room(c10::function_ref<void(bool)> work, const Operator* op) {
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

}  // namespace sing
