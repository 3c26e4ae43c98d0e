#include "client/plans.h"

namespace sing::client {

namespace {
std::string_view as_text(std::span<const std::byte> key) {
  return {reinterpret_cast<const char*>(key.data()), key.size()};
}
}  // namespace

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

PlanCache& PlanCache::get() {
  static PlanCache* const cache = new PlanCache();
  return *cache;
}

std::shared_ptr<const Plan> PlanCache::find(std::span<const std::byte> key) const {
  std::lock_guard lock(mutex_);
  const auto found = plans_.find(as_text(key));
  if (found == plans_.end()) {
    ++misses_;
    return nullptr;
  }
  ++hits_;
  return found->second;
}

uint64_t PlanCache::hits() const {
  std::lock_guard lock(mutex_);
  return hits_;
}

uint64_t PlanCache::misses() const {
  std::lock_guard lock(mutex_);
  return misses_;
}

void PlanCache::insert(std::span<const std::byte> key, std::shared_ptr<const Plan> plan) {
  std::lock_guard lock(mutex_);
  if (plans_.size() >= kPlansMax) plans_.clear();
  plans_.insert_or_assign(std::string(as_text(key)), std::move(plan));
}

}  // namespace sing::client
