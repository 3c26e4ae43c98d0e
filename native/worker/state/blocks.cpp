#include "worker/state/blocks.h"

#include <c10/core/CPUAllocator.h>
#include <malloc.h>
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
  if (bytes < kLeastBytes) return from_heap(bytes);
  const std::lock_guard lock(mutex_);
  void* data = find(bytes);
  if (data == nullptr) {
    shrink(kept_bytes_ - std::min(kept_bytes_, bytes));
    data = fresh_block(bytes);
    if (data == nullptr) {
      shrink(0);
      return from_heap(bytes);
    }
    used_.emplace(data, Block{data, bytes, [](void* memory, size_t) { std::free(memory); }});
  }
  count_used(static_cast<ptrdiff_t>(used_.at(data).bytes));
  return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
}

c10::DataPtr Blocks::adopt(void* data, size_t bytes, void (*free)(void* data, size_t bytes)) {
  const std::lock_guard lock(mutex_);
  used_.emplace(data, Block{data, bytes, free});
  count_used(static_cast<ptrdiff_t>(bytes));
  return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
}

c10::DataPtr Blocks::from_heap(size_t bytes) {
  c10::DataPtr data = c10::GetDefaultCPUAllocator()->allocate(bytes);
  const size_t taken = bytes == 0 ? 0 : malloc_usable_size(data.get());
  if (taken < kCountedBytes) return data;
  count_used(static_cast<ptrdiff_t>(taken));
  void* const memory = data.release_context();
  return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
}

void Blocks::count_used(ptrdiff_t bytes) noexcept {
  const size_t used = used_bytes_ += static_cast<size_t>(bytes);
  size_t most = used_max_.load(std::memory_order_relaxed);
  while (bytes > 0 && used > most && !used_max_.compare_exchange_weak(most, used)) {
  }
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
      const Block block = found->second;
      blocks.used_.erase(found);
      blocks.count_used(-static_cast<ptrdiff_t>(block.bytes));
      if (block.bytes < kLeastBytes) return block.free(block.data, block.bytes);
      blocks.kept_.push_back(block);
      blocks.kept_bytes_ += block.bytes;
      return blocks.shrink(kKeptBytes);
    }
  }
  const size_t bytes = malloc_usable_size(data);
  if (bytes >= kCountedBytes) blocks.count_used(-static_cast<ptrdiff_t>(bytes));
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
  used_.emplace(found.data, found);
  kept_.erase(best);
  kept_bytes_ -= found.bytes;
  return found.data;
}

void Blocks::shrink(size_t bytes) {
  while (kept_bytes_ > bytes) {
    const Block oldest = kept_.front();
    kept_.pop_front();
    kept_bytes_ -= oldest.bytes;
    oldest.free(oldest.data, oldest.bytes);
  }
}

}  // namespace sing
