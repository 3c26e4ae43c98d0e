#include "client/torch/labels.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string>

#include <c10/util/Exception.h>

#include "client/log/session.h"

namespace sing::client {

namespace {

constexpr int kLabelsMax = 64;  // torch itself has a limit of this size

// A number in an environment variable; 0 if it is none. Launchers set such variables at any time.
int number_in(const char* variable) noexcept {
  const char* text = std::getenv(variable);
  int value = 0;
  if (text != nullptr) std::from_chars(text, text + std::strlen(text), value);
  return std::clamp(value, 0, kLabelsMax);
}

// Labels that were used: torch keeps something for each device, and must not find more of them.
std::atomic<int> used{1};

}  // namespace

c10::DeviceIndex label_count() noexcept {
  const int ranks = std::getenv("LOCAL_RANK") != nullptr ? number_in("LOCAL_WORLD_SIZE") : 0;
  const int wanted = ranks > 0 ? ranks : number_in("SING_RANKS");
  return static_cast<c10::DeviceIndex>(std::max(wanted, used.load(std::memory_order_relaxed)));
}

void check_label(c10::DeviceIndex index) {
  if (index < used.load(std::memory_order_relaxed)) [[likely]]
    return;
  const int count = Session::opened_here() ? kLabelsMax : label_count();
  TORCH_CHECK(index < count, "CUDA error: invalid device ordinal ", static_cast<int>(index),
              count == 1 ? std::string(": a session has one device, cuda:0")
                         : ": the last one is cuda:" + std::to_string(count - 1));
  int most = used.load();
  while (most <= index && !used.compare_exchange_weak(most, index + 1)) {
  }
}

c10::DeviceIndex requested_label(c10::ArrayRef<c10::IValue> operands) noexcept {
  for (const c10::IValue& operand : operands) {
    if (operand.isDevice() && operand.toDevice().type() == kDevice)
      return operand.toDevice().index();
  }
  return -1;
}

}  // namespace sing::client
