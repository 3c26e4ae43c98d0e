// Device state of one session: what the numbers in its log refer to.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "oplog/settings.h"
#include "worker/exec/failures.h"
#include "worker/exec/generators.h"
#include "worker/operators/operators.h"
#include "worker/state/device_time.h"
#include "worker/state/exactness.h"
#include "worker/state/storages.h"

namespace sing {

struct State {
  static constexpr size_t kEventsMax = 1 << 20;

  // `replicas`: of the seat in which this session is executed; null: none.
  State(c10::Device device, const Word<uint64_t>* granted, Limits limits = {},
        Replicas* replicas = nullptr)
      : device(device),
        limits(limits),
        storages(device, granted, replicas, limits.check_splicing),
        operators(device.type() == c10::DeviceType::CPU, limits.allowed),
        generators(device) {
    if (!device.is_cpu()) time.emplace(device);
  }

  c10::Device device;
  Limits limits;
  Storages storages;
  Operators operators;
  Generators generators;
  std::optional<DeviceTime> time;  // of a device other than the CPU
  std::unordered_map<uint32_t, Stamp> events;
  std::optional<Settings> settings;  // none: torch's initial settings
  // The first failure that no request has reported yet, and the number of failures so far:
  // see Note [Failures] in executor.h.
  std::optional<Failure> pending;
  uint32_t failures = 0;
  // Requests that gave other sizes or another outcome than they had given before.
  uint64_t diverged = 0;
  Exactness exactness;

  bool stale(const Slot& slot) const { return pending && slot.stale == failures; }
};

}  // namespace sing
