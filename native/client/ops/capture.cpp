#include "client/ops/capture.h"

#include <algorithm>

#include <c10/util/Exception.h>

#include "client/torch/generators.h"

namespace sing::client {

namespace {
constexpr const char* kNotPermitted =
    "CUDA error: operation not permitted when stream is capturing: ";
}  // namespace

// ---------------------------------------------------------------- making one

Capture* Session::begin_capture() {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(capture_.load() == nullptr, "a CUDA graph is being captured already");
  auto* capture = new Capture(settings_[settings_number()]);
  capture_.store(capture);
  return capture;
}

void Session::end_capture(Capture& capture) {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(capture.exists() && capture_.load() == &capture,
              "this CUDA graph is not being captured");
  capture_.store(nullptr);
  capture.idle_.clear();
}

// Returns true if a record was kept, and is not to be sent.
bool Session::keep(RecordKind kind, uint8_t flags, std::span<const std::byte> payload,
                   std::span<const std::byte> tail) {
  TORCH_CHECK((flags & kRequest) == 0, kNotPermitted, "it waits for the device");
  TORCH_CHECK(kind != RecordKind::write, kNotPermitted,
              "it copies from the host; make such tensors before the capture");
  if (kind == RecordKind::generator) {
    TORCH_CHECK(static_cast<GeneratorAction>(payload[4]) == GeneratorAction::free, kNotPermitted,
                "it sets a random number generator");
  }
  if (kind != RecordKind::call) return false;
  std::lock_guard lock(mutex_);
  Capture* capture = capture_.load();
  if (capture == nullptr) return false;
  auto& call = capture->calls_.emplace_back();
  call.flags = flags;
  call.payload.assign(payload.begin(), payload.end());
  call.payload.insert(call.payload.end(), tail.begin(), tail.end());
  return true;
}

void Session::pin(Slot* slot) {
  std::lock_guard lock(mutex_);
  if (Capture* capture = capture_.load()) pin_locked(*capture, slot);
}

void Session::pin_locked(Capture& capture, Slot* slot) {
  if (capture.pinned_.insert(slot).second) ++slot->pins;
}

// Returns a storage that the capture made and no longer needs.
Slot* Session::take_idle_locked(uint64_t bytes) {
  auto& idle = capture_.load()->idle_;
  const auto found =
      std::find_if(idle.begin(), idle.end(), [&](Slot* slot) { return slot->bytes == bytes; });
  if (found == idle.end()) return nullptr;
  Slot* slot = *found;
  idle.erase(found);
  slot->freed = false;
  return slot;
}

// Returns true if a storage that was freed must stay alive, since captures name it.
bool Session::outlive_locked(Slot* slot) {
  if (slot->pins == 0) return false;
  slot->freed = true;
  Capture* capture = capture_.load();
  if (capture != nullptr && slot->maker == capture && slot->pins == 1) {
    capture->idle_.push_back(slot);
  }
  return true;
}

// ---------------------------------------------------------------- using one

void Session::replay(const Capture& capture) {
  TORCH_CHECK(capture.exists(),
              "this CUDA graph belongs to the process from which this one was forked");
  TORCH_CHECK(capture_.load() == nullptr, kNotPermitted, "it replays another graph");
  const auto set = [&](const Settings& values) {
    Writer out;
    put_settings(out, values);
    append(RecordKind::settings, out.view());
  };
  Settings present{};
  {
    std::lock_guard lock(mutex_);
    present = settings_[settings_number()];
  }
  if (present != capture.settings_) set(capture.settings_);
  for (const Capture::Record& call : capture.calls_) {
    append(RecordKind::call, call.payload, {}, call.flags);
  }
  if (present != capture.settings_) set(present);
}

void Session::discard(Capture* capture) noexcept {
  std::vector<Slot*> freed;
  {
    std::lock_guard lock(mutex_);
    Capture* made = capture;
    capture_.compare_exchange_strong(made, nullptr);
    for (Slot* slot : capture->pinned_) {
      if (slot->maker == capture) slot->maker = nullptr;
      if (--slot->pins == 0 && slot->freed) freed.push_back(slot);
    }
  }
  delete capture;
  for (Slot* slot : freed) free(slot);
}

// ---------------------------------------------------------------- learning shapes

Probing::Probing(bool random) : random_(random) {
  ++Session::probing_;
  if (random_) keep_default_generator();
}

Probing::~Probing() {
  try {
    if (random_) put_back_default_generator();
  } catch (const std::exception&) {
    // The session has ended: the generator is no longer used.
  }
  --Session::probing_;
}

}  // namespace sing::client
