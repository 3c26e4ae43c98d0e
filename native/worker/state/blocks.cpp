#include "worker/state/blocks.h"

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>

namespace sing {
namespace {

constexpr size_t kHugeBytes = 2 << 20;
// A block may exceed the size it is used for by this part of itself.
constexpr size_t kSparePart = 8;

void* fresh_block(size_t bytes) {
  void* data = nullptr;
  if (posix_memalign(&data, kHugeBytes, bytes) != 0) return nullptr;
  madvise(data, bytes / kHugeBytes * kHugeBytes, MADV_HUGEPAGE);
  return data;
}

}  // namespace

Blocks& Blocks::get() {
  static auto* const blocks = new Blocks;
  return *blocks;
}

void Blocks::install() { c10::SetCPUAllocator(this, /*priority=*/1); }

c10::DataPtr Blocks::allocate(size_t bytes) {
  if (bytes < kLeastBytes) return c10::GetDefaultCPUAllocator()->allocate(bytes);
  const std::lock_guard lock(mutex_);
  void* data = find(bytes);
  if (data == nullptr) {
    shrink(kept_bytes_ - std::min(kept_bytes_, bytes));
    data = fresh_block(bytes);
    if (data == nullptr) {
      shrink(0);
      return c10::GetDefaultCPUAllocator()->allocate(bytes);
    }
    used_.emplace(data, bytes);
  }
  return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
}

c10::DeleterFnPtr Blocks::raw_deleter() const { return &release; }

void Blocks::copy_data(void* to, const void* from, size_t bytes) const {
  default_copy_data(to, from, bytes);
}

size_t Blocks::kept() const {
  const std::lock_guard lock(mutex_);
  return kept_bytes_;
}

void Blocks::empty() {
  const std::lock_guard lock(mutex_);
  shrink(0);
}

void Blocks::release(void* data) {
  Blocks& blocks = get();
  {
    const std::lock_guard lock(blocks.mutex_);
    if (const auto found = blocks.used_.find(data); found != blocks.used_.end()) {
      blocks.kept_.push_back({data, found->second});
      blocks.kept_bytes_ += found->second;
      blocks.used_.erase(found);
      return blocks.shrink(kKeptBytes);
    }
  }
  c10::GetDefaultCPUAllocator()->raw_deleter()(data);
}

// Returns the smallest block that fits; among equal ones, the one freed last: it may still be in a
// CPU cache.
void* Blocks::find(size_t bytes) {
  auto best = kept_.end();
  for (auto at = kept_.begin(); at != kept_.end(); ++at) {
    if (at->bytes < bytes || at->bytes - bytes > at->bytes / kSparePart) continue;
    if (best == kept_.end() || at->bytes <= best->bytes) best = at;
  }
  if (best == kept_.end()) return nullptr;
  const Block found = *best;
  used_.emplace(found.data, found.bytes);
  kept_.erase(best);
  kept_bytes_ -= found.bytes;
  return found.data;
}

void Blocks::shrink(size_t bytes) {
  while (kept_bytes_ > bytes) {
    kept_bytes_ -= kept_.front().bytes;
    std::free(kept_.front().data);
    kept_.pop_front();
  }
}

}  // namespace sing
