#include "worker/state/mapped.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "oplog/mapping.h"
#include "worker/state/blocks.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14
#endif

namespace sing {

namespace {

constexpr uint64_t kHugeBytes = 2 << 20;
// Above this size a thread is worth its start-up cost.
constexpr uint64_t kPartBytes = 8 << 20;
constexpr unsigned kThreadsMax = 4;

uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

// Returns fresh memory, aligned so that the system can use huge pages. Empty if there is none.
Mapping fresh_memory(uint64_t bytes) {
  const uint64_t reserved = bytes + kHugeBytes;
  void* found = mmap(nullptr, reserved, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return {};
  auto* const begin = static_cast<std::byte*>(found);
  auto* const data =
      reinterpret_cast<std::byte*>(round_up(reinterpret_cast<uintptr_t>(found), kHugeBytes));
  if (data > begin) munmap(begin, static_cast<size_t>(data - begin));
  munmap(data + bytes, static_cast<size_t>(begin + reserved - (data + bytes)));
  madvise(data, bytes, MADV_HUGEPAGE);
  return Mapping(data, bytes);
}

void copy_by_threads(std::byte* to, const std::byte* from, uint64_t count) {
  const auto most = std::clamp(std::thread::hardware_concurrency(), 1u, kThreadsMax);
  const uint64_t parts = std::clamp<uint64_t>(count / kPartBytes, 1, most);
  const uint64_t part = round_up(count / parts, kHugeBytes);
  std::vector<std::jthread> threads;
  for (uint64_t at = part; at < count; at += part) {
    threads.emplace_back([=] { std::memcpy(to + at, from + at, std::min(part, count - at)); });
  }
  std::memcpy(to, from, std::min(part, count));
}

// Frees memory of which the first bytes are those of a file. The file's memory would stay as long
// as another part of it is in use. (For the bytes after them the first call has no effect.)
void free_taken(void* data, size_t bytes) {
  madvise(data, bytes, MADV_REMOVE);
  munmap(data, bytes);
}

}  // namespace

struct MappedMemory {
  Mapping all;
  uint64_t mapped = 0;  // bytes from the start that are mapped from the arena
  Extent extent;
  std::shared_ptr<MappedExtents> others;  // of the same arena
  std::atomic<bool> owned{false};

  ~MappedMemory() {
    if (others) others->remove(*this);
  }
  static void free(void* memory) { delete static_cast<MappedMemory*>(memory); }
  static MappedMemory* of(const c10::Storage& storage) noexcept {
    return storage ? storage.data_ptr().cast_context<MappedMemory>(&free) : nullptr;
  }
  void own();
};

void MappedExtents::add(MappedMemory& memory) {
  const std::lock_guard lock(mutex_);
  all_.insert(&memory);
}

void MappedExtents::remove(MappedMemory& memory) noexcept {
  const std::lock_guard lock(mutex_);
  all_.erase(&memory);
}

void MappedExtents::own(MappedMemory& memory) {
  const std::lock_guard lock(mutex_);
  if (all_.contains(&memory)) memory.own();
  all_.erase(&memory);
}

void MappedExtents::own_all() {
  const std::lock_guard lock(mutex_);
  for (MappedMemory* each : all_) each->own();
  all_.clear();
}

std::vector<Extent> MappedExtents::list() const {
  const std::lock_guard lock(mutex_);
  std::vector<Extent> found;
  for (const MappedMemory* each : all_) found.push_back(each->extent);
  return found;
}

std::optional<c10::DataPtr> map_extent(const Arena& arena, const Extent& extent, uint64_t bytes) {
  const uint64_t mapped = round_up(extent.count, kPageBytes);
  auto memory = std::make_unique<MappedMemory>();
  memory->all = fresh_memory(round_up(bytes, kPageBytes));
  memory->mapped = mapped;
  if (!memory->all || !arena.map(extent.offset, {memory->all.data(), mapped}, /*shared=*/false)) {
    return std::nullopt;
  }
  memory->extent = extent;
  memory->others = arena.mapped();
  memory->others->add(*memory);
  std::byte* const data = memory->all.data();
  return c10::DataPtr(data, memory.release(), &MappedMemory::free,
                      c10::Device(c10::DeviceType::CPU));
}

std::optional<c10::DataPtr> take_extent(const Arena& file, const Extent& extent, uint64_t bytes) {
  Mapping memory = fresh_memory(round_up(bytes, kPageBytes));
  if (!memory) return std::nullopt;
  const std::span<std::byte> place(memory.data(), round_up(extent.count, kPageBytes));
  if (!file.map(extent.offset, place, /*shared=*/true)) return std::nullopt;
  populate(place);
  c10::DataPtr data = Blocks::get().adopt(memory.data(), memory.size(), &free_taken);
  memory.release();
  return data;
}

bool is_mapped(const c10::Storage& storage) noexcept {
  const MappedMemory* memory = MappedMemory::of(storage);
  return memory != nullptr && !memory->owned.load(std::memory_order_relaxed);
}

void own(const c10::Storage& storage) {
  if (is_mapped(storage)) {
    MappedMemory& memory = *MappedMemory::of(storage);
    memory.others->own(memory);
  }
}

void MappedMemory::own() {
  Mapping copy = fresh_memory(mapped);
  if (!copy) throw std::bad_alloc();
  copy_by_threads(copy.data(), all.data(), mapped);
  // Replaces the mapping in one step, huge pages included.
  if (mremap(copy.data(), copy.size(), copy.size(), MREMAP_MAYMOVE | MREMAP_FIXED, all.data()) ==
      MAP_FAILED) {
    throw std::bad_alloc();
  }
  copy.release();
  owned.store(true, std::memory_order_relaxed);
}

void populate(std::span<std::byte> mapped) noexcept {
  const auto begin = reinterpret_cast<uintptr_t>(mapped.data()) / kPageBytes * kPageBytes;
  const auto end = reinterpret_cast<uintptr_t>(mapped.data() + mapped.size());
  // Older kernels do not support this; the pages are then faulted in when they are read.
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_READ);
}

}  // namespace sing
