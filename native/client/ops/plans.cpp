#include "client/ops/plans.h"

#include <array>
#include <cstring>

namespace sing::client {

Output tensor_output(at::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  Output output;
  output.tag = Tag::tensor;
  output.geometry.dtype = dtype;
  output.geometry.sizes.assign(sizes.begin(), sizes.end());
  output.geometry.strides.assign(strides.begin(), strides.end());
  output.bytes = output.geometry.storage_bytes();
  return output;
}

Output contiguous_output(at::ScalarType dtype, c10::IntArrayRef sizes) {
  const Dimensions copied(sizes.begin(), sizes.end());
  Dimensions strides;
  contiguous_strides(copied, strides);
  return tensor_output(dtype, copied, strides);
}

Output undefined_output() {
  Output output;
  output.tag = Tag::undefined;
  return output;
}

// ---------------------------------------------------------------- the cache

// See Note [Nearby plans].
class PlanCache::Nearby {
 public:
  Nearby() {
    PlanCache& cache = get();
    std::lock_guard lock(cache.mutex_);
    cache.threads_.push_back(this);
  }
  ~Nearby() {
    PlanCache& cache = get();
    std::lock_guard lock(cache.mutex_);
    cache.hits_ += hits();
    std::erase(cache.threads_, this);
  }
  Nearby(const Nearby&) = delete;
  Nearby& operator=(const Nearby&) = delete;

  const Plan* find(const Key& key) noexcept {
    const Entry& entry = entries_[index(key)];
    if (entry.hash != key.hash || entry.plan == nullptr ||
        !(Key{entry.plan->key, entry.hash} == key)) {
      return nullptr;
    }
    hits_.store(hits() + 1, std::memory_order_relaxed);
    return entry.plan.get();
  }
  void keep(const Key& key, std::shared_ptr<const Plan> plan, bool outermost) {
    if (outermost) {
      held_.clear();
      entries_[index(key)] = {key.hash, std::move(plan)};
    } else {
      held_.push_back(std::move(plan));
    }
  }
  uint64_t hits() const noexcept { return hits_.load(std::memory_order_relaxed); }

 private:
  static constexpr size_t kEntries = 2048;
  struct Entry {
    uint64_t hash = 0;
    std::shared_ptr<const Plan> plan;
  };
  static size_t index(const Key& key) noexcept { return key.hash % kEntries; }

  std::array<Entry, kEntries> entries_;
  std::vector<std::shared_ptr<const Plan>> held_;
  std::atomic<uint64_t> hits_{0};
};

PlanCache& PlanCache::get() {
  static PlanCache* const cache = new PlanCache();
  return *cache;
}

PlanCache::Nearby& PlanCache::nearby() {
  static thread_local const std::unique_ptr<Nearby> plans = std::make_unique<Nearby>();
  return *plans;
}

bool PlanCache::Key::operator==(const Key& other) const noexcept {
  return bytes.size() == other.bytes.size() &&
         std::memcmp(bytes.data(), other.bytes.data(), bytes.size()) == 0;
}

// Hashes eight bytes at a time; keys have about a hundred.
PlanCache::Key PlanCache::key_of(std::span<const std::byte> bytes) noexcept {
  constexpr uint64_t kFactor = 0x9e3779b97f4a7c15;
  uint64_t hash = bytes.size() * kFactor;
  const auto mix = [&hash](uint64_t word) {
    hash = (hash ^ word) * kFactor;
    hash ^= hash >> 32;
  };
  size_t at = 0;
  for (uint64_t word = 0; at + sizeof(word) <= bytes.size(); at += sizeof(word)) {
    std::memcpy(&word, bytes.data() + at, sizeof(word));
    mix(word);
  }
  uint64_t rest = 0;
  for (; at < bytes.size(); ++at) rest = rest << 8 | static_cast<uint64_t>(bytes[at]);
  mix(rest);
  return {bytes, hash};
}

const Plan* PlanCache::find(std::span<const std::byte> bytes, bool outermost) {
  const Key key = key_of(bytes);
  Nearby& near = nearby();
  if (const Plan* plan = near.find(key)) [[likely]]
    return plan;
  std::shared_ptr<const Plan> plan;
  {
    std::lock_guard lock(mutex_);
    const auto found = plans_.find(key);
    if (found == plans_.end()) {
      ++misses_;
      return nullptr;
    }
    ++hits_;
    plan = found->second;
  }
  const Plan* known = plan.get();
  near.keep(key, std::move(plan), outermost);
  return known;
}

const Plan* PlanCache::find_nearby(std::span<const std::byte> bytes) {
  return nearby().find(key_of(bytes));
}

uint64_t PlanCache::hits() const {
  std::lock_guard lock(mutex_);
  uint64_t sum = hits_;
  for (const Nearby* each : threads_) sum += each->hits();
  return sum;
}

uint64_t PlanCache::misses() const {
  std::lock_guard lock(mutex_);
  return misses_;
}

void PlanCache::insert(std::span<const std::byte> key, std::shared_ptr<Plan> plan) {
  plan->key.assign(key.begin(), key.end());
  const Key kept = key_of(plan->key);
  std::lock_guard lock(mutex_);
  if (plans_.size() >= kPlansMax) plans_.clear();
  plans_.erase(kept);  // together with the plan, in which its key is stored
  plans_.emplace(kept, std::move(plan));
}

}  // namespace sing::client
