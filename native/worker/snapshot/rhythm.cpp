#include "worker/snapshot/rhythm.h"

#include <algorithm>
#include <chrono>

namespace sing {

namespace {

using std::chrono::milliseconds;

// Gaps between the operators of one optimizer step are shorter than this part of the rest.
constexpr uint64_t kPart = 8;
constexpr uint64_t kPauseMin = 2;
constexpr milliseconds kLongest{5000};
constexpr milliseconds kBetweenLooks{20};

}  // namespace

void Rhythm::changed_again() noexcept {
  const uint64_t now = records_.load(std::memory_order_relaxed);
  const uint64_t stretch = now - last_.load(std::memory_order_relaxed);
  if (stretch > longest_.load(std::memory_order_relaxed)) {
    longest_.store(stretch, std::memory_order_relaxed);
  }
  last_.store(now, std::memory_order_relaxed);
  const uint64_t pause = pause_.load(std::memory_order_relaxed);
  if (pause != 0) due_.store(now + pause, std::memory_order_relaxed);
}

void Rhythm::await_burst(const std::function<bool()>& enough) {
  const uint64_t usual = longest_.exchange(0, std::memory_order_relaxed);
  const uint64_t quiet =
      records_.load(std::memory_order_relaxed) - last_.load(std::memory_order_relaxed);
  if (usual == 0 || quiet > 2 * usual) return;
  const auto end = std::chrono::steady_clock::now() + kLongest;
  std::unique_lock lock(mutex_);
  pause_.store(std::max(usual / kPart, kPauseMin), std::memory_order_relaxed);
  while (awaited() && std::chrono::steady_clock::now() < end && !enough()) {
    changed_.wait_for(lock, kBetweenLooks);
  }
  pause_.store(0, std::memory_order_relaxed);
  due_.store(0, std::memory_order_relaxed);
}

void Rhythm::ring() noexcept {
  std::lock_guard lock(mutex_);
  pause_.store(0);
  changed_.notify_all();
}

}  // namespace sing
