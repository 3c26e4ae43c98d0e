#include "client/torch/device.h"

#include <atomic>
#include <map>
#include <mutex>

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/engine.h>

#include "client/log/forks.h"
#include "client/ops/tensors.h"
#include "client/torch/generators.h"
#include "client/torch/profiler.h"

namespace sing::client {

namespace {

// ------------------------------------------------------------------ pinned memory

// Host memory that Python may call pinned. Copies read it at once, so any memory would do; its only
// purpose is that is_pinned() answers as on a GPU.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::GetCPUAllocator()->raw_allocate(bytes);
    if (data != nullptr) {
      std::lock_guard lock(mutex_);
      ranges_[static_cast<const std::byte*>(data)] = bytes;
    }
    return {data, data, &free, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }
  bool owns(const void* pointer) const {
    std::lock_guard lock(mutex_);
    const auto* at = static_cast<const std::byte*>(pointer);
    auto found = ranges_.upper_bound(at);
    if (found == ranges_.begin()) return false;
    --found;
    return at < found->first + std::max<size_t>(found->second, 1);
  }
  static PinnedAllocator& get() {
    static auto* instance = new PinnedAllocator();
    return *instance;
  }

 private:
  static void free(void* data) {
    if (data == nullptr) return;
    {
      std::lock_guard lock(get().mutex_);
      get().ranges_.erase(static_cast<const std::byte*>(data));
    }
    c10::GetCPUAllocator()->raw_deallocate(data);
  }
  mutable std::mutex mutex_;
  const HeldAtFork held_{mutex_};
  std::map<const std::byte*, size_t> ranges_;
};

// ------------------------------------------------------------------ streams, events

// A session executes one operator after another: streams are only names, and waiting for an event
// of another stream always succeeds at once.
thread_local c10::StreamId current_stream = 0;
constexpr c10::StreamId kUrgent = c10::StreamId{1} << 32;  // bit of a stream's id: the requested
                                                           // priority
std::atomic<c10::StreamId> last_stream{0};
std::atomic<uint32_t> last_event{0};

struct EventState {
  uint32_t number;    // in the worker; 0 if it has no timestamp
  uint64_t position;  // position of the log when it was recorded
  uint32_t made_in = generation;
};

// Of this process: those of the process from which it was forked are over.
bool exists(const EventState* event) { return event != nullptr && event->made_in == generation; }

void check_exists(const EventState* event) {
  TORCH_CHECK(event->made_in == generation,
              "this CUDA event belongs to the process from which this one was forked");
}

void synchronize() {
  if (Session::connected()) Session::get().synchronize();
}

Writer event_record(uint32_t number, EventAction action) {
  Writer out;
  out.put<uint32_t>(number);
  out.put<uint8_t>(static_cast<uint8_t>(action));
  for (int i = 0; i < 3; ++i) out.put<uint8_t>(0);
  return out;
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(kDevice, current_label); }
  void setDevice(c10::Device device) const override {
    check_label(device.index());
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { set_label(device.index()); }
  c10::DeviceIndex deviceCount() const noexcept override { return label_count(); }

  c10::Stream getStream(c10::Device device) const override {
    return stream(device, current_stream);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool urgent) const override {
    return stream(device, ++last_stream | (urgent ? kUrgent : 0));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return getStreamFromGlobalPool(device, priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const c10::Stream before = stream(next.device(), current_stream);
    current_stream = next.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override {
    return !Session::connected() || Session::get().reached(Session::get().head());
  }
  void synchronizeStream(const c10::Stream&) const override { synchronize(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize(); }

  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    auto* state = static_cast<EventState*>(*event);
    if (state == nullptr) {
      state = new EventState{flag == c10::EventFlag::BACKEND_DEFAULT ? ++last_event : 0, 0};
      *event = state;
    }
    check_exists(state);
    if (state->number != 0) {
      Session::get().append(RecordKind::event,
                            event_record(state->number, EventAction::record).view());
    }
    state->position = Session::get().head();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override {
    const auto* state = static_cast<EventState*>(event);
    return !exists(state) || Session::get().reached(state->position);
  }
  void synchronizeEvent(void* event) const override {
    if (!queryEvent(event)) Session::get().synchronize();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    auto* state = static_cast<EventState*>(event);
    if (state == nullptr) return;
    if (state->number != 0 && exists(state)) {
      try {
        Session::get().append(RecordKind::event,
                              event_record(state->number, EventAction::free).view());
      } catch (const std::exception&) {
        // The session has ended, and with it the event.
      }
    }
    delete state;
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto* from = static_cast<EventState*>(first);
    const auto* to = static_cast<EventState*>(second);
    TORCH_CHECK(from != nullptr && to != nullptr,
                "Both events must be recorded before calculating elapsed time.");
    TORCH_CHECK(from->number != 0 && to->number != 0,
                "Both events must be created with argument 'enable_timing=True'.");
    check_exists(from);
    check_exists(to);
    Writer out = event_record(from->number, EventAction::elapsed);
    out.put<uint32_t>(to->number);
    double milliseconds = 0;
    Session::get().request(RecordKind::event, out.view(),
                           std::as_writable_bytes(std::span(&milliseconds, 1)));
    return milliseconds;
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

 private:
  static void set_label(c10::DeviceIndex index) noexcept {
    if (index >= 0) current_label = index;
  }
  c10::Stream stream(c10::Device device, c10::StreamId id) const {
    if (!device.has_index()) device = getDevice();
    return c10::Stream(c10::Stream::UNSAFE, device, id);
  }
};

// ------------------------------------------------------------------ hooks

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  // The device decides which of these work: it ignores a preference for a library that it lacks.
  bool hasMAGMA() const override { return true; }
  bool hasCuSOLVER() const override { return true; }
  bool hasCuBLASLt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return label_count(); }
  int getNumGPUs() const override { return label_count(); }
  c10::DeviceIndex current_device() const override { return current_label; }
  c10::DeviceIndex getCurrentDevice() const override { return current_label; }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    check_label(index);
    current_label = std::max<c10::DeviceIndex>(index, 0);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    if (index < 0) return -1;
    check_label(index);
    return std::exchange(current_label, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index);
  }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(kDevice, current_label); }
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::get().owns(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedAllocator::get(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return allocator(); }
  void deviceSynchronize(c10::DeviceIndex) const override { synchronize(); }
  std::string showConfig() const override { return "device proxy of jupyter_sing"; }
};

}  // namespace

// At its first backward pass, torch starts a thread for each device, and from then on refuses every
// backward pass in children that are forked. It looks for devices only once, and here finds none;
// see Note [Backward] in calls.cpp for the calling thread.
void keep_autograd_single_threaded() {
  auto& slot = c10::impl::device_guard_impl_registry[static_cast<size_t>(kDevice)];
  const auto* guard = slot.exchange(nullptr);
  try {
    torch::autograd::Engine::get_default_engine().initialize_device_threads_pool();
  } catch (...) {
    slot.store(guard);
    throw;
  }
  slot.store(guard);
}

void register_device() {
  at::CUDAHooksRegistry()->Register(
      "CUDAHooks",
      [](at::CUDAHooksArgs) -> std::unique_ptr<at::CUDAHooksInterface> {
        return std::make_unique<Hooks>();
      },
      c10::REGISTRY_PREFERRED);
  static Guard guard;
  static const c10::impl::DeviceGuardImplRegistrar guard_registration(kDevice, &guard);
  c10::SetAllocator(kDevice, allocator(), 1);
  register_profiler();
}

}  // namespace sing::client
