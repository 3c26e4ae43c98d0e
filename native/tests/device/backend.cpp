#include "tests/device/backend.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>

namespace sing::test {

namespace {

thread_local c10::DeviceIndex t_device = 0;
thread_local std::array<size_t, AsyncDevice::kDevices> t_streams{};

size_t number(c10::DeviceIndex index) { return static_cast<size_t>(index < 0 ? t_device : index); }
AsyncDevice& at(c10::DeviceIndex index) { return AsyncDevice::at(static_cast<int>(number(index))); }
c10::Stream stream_of(c10::DeviceIndex index, size_t stream) {
  return c10::Stream(c10::Stream::UNSAFE, AsyncDevice::device(static_cast<int>(number(index))),
                     static_cast<c10::StreamId>(stream));
}
size_t line_of(const c10::Stream& stream) { return static_cast<size_t>(stream.id()); }

// As CUDA's of torch, also in when it makes contexts.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    if (device.index() >= 0 && device != before) setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return AsyncDevice::device(t_device); }
  void setDevice(c10::Device device) const override {
    t_device = device.index();
    at(t_device).use();
  }
  // Does not make a context.
  void uncheckedSetDevice(c10::Device device) const noexcept override { t_device = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    return stream_of(device.index(), t_streams[number(device.index())]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(device.index(), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream_of(device.index(), at(device.index()).next_pooled());
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStreamFromGlobalPool(device, false);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    t_streams[number(stream.device_index())] = line_of(stream);
    return before;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<MarkPtr*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    MarkPtr mark = at(stream.device_index()).record(line_of(stream));
    if (*event == nullptr) *event = new MarkPtr();
    *static_cast<MarkPtr*>(*event) = std::move(mark);
  }
  void block(void* event, const c10::Stream& stream) const override {
    at(stream.device_index()).wait(line_of(stream), *static_cast<MarkPtr*>(event));
  }
  bool queryEvent(void* event) const override {
    return at(t_device).done(*static_cast<MarkPtr*>(event));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return AsyncDevice::kDevices; }
  bool queryStream(const c10::Stream& stream) const override {
    return at(stream.device_index()).idle(line_of(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    at(stream.device_index()).synchronize(line_of(stream));
  }
  void synchronizeEvent(void* event) const override {
    at(t_device).synchronize(*static_cast<MarkPtr*>(event));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    const c10::Device before = getDevice();
    setDevice(AsyncDevice::device(static_cast<int>(number(index))));
    at(index).synchronize();
    setDevice(before);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get_context() == nullptr) return;
    at(stream.device_index())
        .record_stream(static_cast<DeviceBlock*>(data.get_context())->shared_from_this(),
                       line_of(stream));
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    const auto at = [](void* event) { return (*static_cast<MarkPtr*>(event))->at_ns; };
    return (static_cast<double>(at(to)) - static_cast<double>(at(from))) / 1e6;
  }
};

// ---------------------------------------------------------------- memory

struct DeviceMemory final : c10::DeviceAllocator {
  // The data's context is its block.
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device = AsyncDevice::device(t_device);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    const DeviceBlockPtr block = at(t_device).allocate(bytes, t_streams[number(t_device)]);
    {
      std::lock_guard lock(mutex_);
      held_.emplace(block.get(), block);
    }
    return {block->data, block.get(), &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "a copy without a stream");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { at(t_device).empty_cache(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Guard().recordDataPtrOnStream(data, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto used = static_cast<int64_t>(at(index).used());
    stats.allocated_bytes[0].current = used;
    stats.reserved_bytes[0].current = used + static_cast<int64_t>(at(index).kept());
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    return at(index).memory();
  }

  static DeviceMemory& get() {
    static DeviceMemory& only = *new DeviceMemory();
    return only;
  }

 private:
  static void release(void* context) {
    if (context == nullptr) return;
    DeviceBlockPtr block;
    {
      DeviceMemory& memory = get();
      std::lock_guard lock(memory.mutex_);
      const auto found = memory.held_.find(static_cast<DeviceBlock*>(context));
      block = std::move(found->second);
      memory.held_.erase(found);
    }
    block->owner->free(block);
  }

  std::mutex mutex_;
  std::map<DeviceBlock*, DeviceBlockPtr> held_;
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, c10::Device(c10::DeviceType::CPU)};
    at(t_device).check();
    std::this_thread::sleep_for(std::chrono::nanoseconds(at(t_device).pinning_ns()));
    auto* data = static_cast<std::byte*>(std::malloc(bytes));
    TORCH_CHECK(data != nullptr, "no memory");
    std::lock_guard lock(mutex_);
    free_settled();
    ranges_.emplace(data, bytes);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool has(const void* data) {
    std::lock_guard lock(mutex_);
    auto after = ranges_.upper_bound(static_cast<const std::byte*>(data));
    if (after == ranges_.begin()) return false;
    --after;
    return static_cast<const std::byte*>(data) < after->first + after->second;
  }
  static PinnedMemory& get() {
    static PinnedMemory& only = *new PinnedMemory();
    return only;
  }

 private:
  static void release(void* data) {
    if (data == nullptr) return;
    PinnedMemory& memory = get();
    std::lock_guard lock(memory.mutex_);
    memory.ranges_.erase(static_cast<const std::byte*>(data));
    memory.freed_.push_back(data);
    memory.free_settled();
  }
  // As with CUDA's allocator, memory given up is not freed before its copies have ended.
  void free_settled() {
    for (int index = 0; index < AsyncDevice::kDevices; ++index) {
      if (at(index).queued() != 0) return;
    }
    for (void* data : freed_) std::free(data);
    freed_.clear();
  }

  std::mutex mutex_;
  std::vector<void*> freed_;
  std::map<const std::byte*, size_t> ranges_;
};

// ---------------------------------------------------------------- generators

constexpr c10::DispatchKeySet kGeneratorKeys{c10::DispatchKey::PrivateUse1};

// Its state is on the host, as that of CUDA's generators.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex index)
      : GeneratorImpl(AsyncDevice::device(index), kGeneratorKeys),
        host(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  // An offset is the number of a state that was asked for recently.
  uint64_t get_offset() const override {
    states[++asked % states.size()] = host.clone();
    return asked;
  }
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset != 0 && asked - offset < states.size(), "an offset of long ago");
    host = states[offset % states.size()].clone();
  }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->host = host.clone();
    return copy;
  }

  at::Generator host;
  mutable std::array<at::Generator, 4> states;
  mutable uint64_t asked = 0;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static const std::array<at::Generator, AsyncDevice::kDevices> all{
        at::make_generator<DeviceGenerator>(static_cast<c10::DeviceIndex>(0)),
        at::make_generator<DeviceGenerator>(static_cast<c10::DeviceIndex>(1))};
    return all[number(index)];
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(static_cast<c10::DeviceIndex>(number(index)));
  }
  at::Device getDeviceFromPtr(void*) const override { return AsyncDevice::device(t_device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemory::get(); }
  bool hasPrimaryContext(c10::DeviceIndex index) const override { return at(index).has_context(); }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return AsyncDevice::kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return t_device; }
};

}  // namespace

void register_backend() {
  c10::register_privateuse1_backend("asynchronous");
  c10::impl::registerDeviceGuard(c10::DeviceType::PrivateUse1, new Guard());
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &DeviceMemory::get());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

AsyncDevice& async_device_of(const at::Tensor& tensor) { return at(tensor.device().index()); }

size_t current_stream(const AsyncDevice& device) {
  for (int i = 0; i < AsyncDevice::kDevices; ++i) {
    if (&AsyncDevice::at(i) == &device) return t_streams[static_cast<size_t>(i)];
  }
  return 0;
}

DeviceBlockPtr block_of(const c10::Storage& storage) {
  void* context = storage.data_ptr().get_context();
  return context == nullptr ? nullptr : static_cast<DeviceBlock*>(context)->shared_from_this();
}

bool is_pinned(const void* data) { return PinnedMemory::get().has(data); }

at::Generator host_generator(const std::optional<at::Generator>& generator, int index) {
  const at::Generator& own = generator && generator->defined()
                                 ? *generator
                                 : at::detail::getPrivateUse1Hooks().getDefaultGenerator(
                                       static_cast<c10::DeviceIndex>(index));
  return static_cast<DeviceGenerator*>(own.unsafeGetGeneratorImpl())->host;
}

}  // namespace sing::test
