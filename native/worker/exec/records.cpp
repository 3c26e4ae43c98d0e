// Executes the records that are no calls of operators.
#include "worker/exec/executor.h"
#include "worker/loop/clock.h"
#include "worker/operators/origins.h"

namespace sing {

namespace {

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
    state_.storages.lose(range.id, shared_name(failure.operation), slot.bytes);
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
    state_.storages.lose(id, shared_name(failure.operation), bytes);
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

}  // namespace sing
