#include "client/torch/profiler.h"

#include <memory>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/profiler/stubs/base.h>
#include <torch/csrc/profiler/util.h>

#include "client/ops/tensors.h"

namespace sing::client {

namespace {

using torch::profiler::impl::ProfilerVoidEventStub;

// Each operator is put between two of the device's events, which costs two records; the time
// between them is requested when the profile is made.
class Stubs final : public torch::profiler::impl::ProfilerStubs {
 public:
  void record(c10::DeviceIndex* device, ProfilerVoidEventStub* event,
              int64_t* host_ns) const override {
    if (device != nullptr) *device = 0;
    auto recorded = std::make_shared<c10::Event>(kDevice, c10::EventFlag::BACKEND_DEFAULT);
    recorded->record(
        c10::impl::VirtualGuardImpl(kDevice).getStream(c10::Device(kDevice, current_label)));
    *event = recorded;
    if (host_ns != nullptr) *host_ns = c10::getTime();
  }
  // Microseconds.
  float elapsed(const ProfilerVoidEventStub* first,
                const ProfilerVoidEventStub* second) const override {
    const auto& from = *static_cast<const c10::Event*>(first->get());
    const auto& to = *static_cast<const c10::Event*>(second->get());
    return static_cast<float>(from.elapsedTime(to) * 1000);
  }
  // Marks and ranges have no consumer in this process.
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> visit) const override { visit(0); }
  void synchronize() const override { Session::get().synchronize(); }
};

}  // namespace

void register_profiler() {
  static Stubs stubs;
  torch::profiler::impl::registerCUDAMethods(&stubs);
}

}  // namespace sing::client
