#include "client/torch/device.h"

#include <atomic>
#include <map>
#include <mutex>

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

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
};

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
    check(device);
    return getDevice();
  }
  c10::Device getDevice() const override { return c10::Device(kDevice, 0); }
  void setDevice(c10::Device device) const override { check(device); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool urgent) const override {
    return stream(++last_stream | (urgent ? kUrgent : 0));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return getStreamFromGlobalPool(device, priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const c10::Stream before = stream(current_stream);
    current_stream = next.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override {
    return Session::get().reached(Session::get().head());
  }
  void synchronizeStream(const c10::Stream&) const override { Session::get().synchronize(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { Session::get().synchronize(); }

  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    auto* state = static_cast<EventState*>(*event);
    if (state == nullptr) {
      state = new EventState{flag == c10::EventFlag::BACKEND_DEFAULT ? ++last_event : 0, 0};
      *event = state;
    }
    if (state->number != 0) {
      Session::get().append(RecordKind::event,
                            event_record(state->number, EventAction::record).view());
    }
    state->position = Session::get().head();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override {
    return event == nullptr || Session::get().reached(static_cast<EventState*>(event)->position);
  }
  void synchronizeEvent(void* event) const override {
    if (!queryEvent(event)) Session::get().synchronize();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    auto* state = static_cast<EventState*>(event);
    if (state == nullptr) return;
    if (state->number != 0 && !Session::forked()) {
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
    Writer out = event_record(from->number, EventAction::elapsed);
    out.put<uint32_t>(to->number);
    double milliseconds = 0;
    Session::get().request(RecordKind::event, out.view(),
                           std::as_writable_bytes(std::span(&milliseconds, 1)));
    return milliseconds;
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

 private:
  static void check(c10::Device device) {
    TORCH_CHECK(device.index() <= 0, "CUDA error: invalid device ordinal");
  }
  c10::Stream stream(c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, 0), id);
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
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(kDevice, 0); }
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::get().owns(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedAllocator::get(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return allocator(); }
  void deviceSynchronize(c10::DeviceIndex) const override { Session::get().synchronize(); }
  std::string showConfig() const override { return "device proxy of jupyter_sing"; }
};

}  // namespace

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
