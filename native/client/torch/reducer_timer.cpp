// DistributedDataParallel's reducer asks for its device's timer; that for CUDA exists only in
// builds with CUDA, where it records events of the driver.
#include <optional>

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace c10d {

namespace {

// Times at which work was issued, not executed: the reducer only logs them.
class ProxyTimer final : public Timer {
 public:
  explicit ProxyTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const int64_t from = getTimeRef(start), to = getTimeRef(end);
    if (from == kUnsetTime || to == kUnsetTime || to < from) return std::nullopt;
    return to - from;
  }
};

C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(TimerRegistry, c10::kCUDA, c10::REGISTRY_PREFERRED,
                                       ProxyTimer)

}  // namespace

}  // namespace c10d
