// Large blocks of host memory, kept for the next tensors of a software device.
//
// Note [Blocks]. Each training step allocates and frees the same hundreds of megabytes. If the
// memory goes back to the system, it must be faulted in and cleared again page by page, and a
// snapshot in progress competes for free pages, too. So freed blocks are kept, as a GPU's caching
// allocator keeps them. Used and kept blocks together never take more than used blocks have taken
// before: an allocation for which no kept block fits first gives back as many bytes as it takes.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstddef>
#include <list>
#include <mutex>
#include <unordered_map>

namespace sing {

// Thread-safe.
class Blocks final : public c10::Allocator {
 public:
  static constexpr size_t kLeastBytes = 32 << 20;  // smaller ones come from the heap
  static constexpr size_t kKeptBytes = size_t{1} << 30;
  static constexpr size_t kCountedBytes = 64 << 10;  // smaller ones are not counted as used

  // The only instance in this process; it is never destroyed.
  static Blocks& get();
  // Makes it the allocator of all tensors on the CPU.
  void install();

  // Throws c10::Error if there is no memory.
  c10::DataPtr allocate(size_t bytes) override;
  // Owns memory that came from elsewhere; it is freed by `free`.
  c10::DataPtr adopt(void* data, size_t bytes, void (*free)(void* data, size_t bytes));
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t bytes) const override;

  // Most bytes that were in use at a time.
  size_t used_max() const noexcept { return used_max_.load(std::memory_order_relaxed); }
  // Bytes that are kept and not in use.
  size_t kept() const;
  // Gives all of them back.
  void empty();

 private:
  struct Block {
    void* data;
    size_t bytes;
    void (*free)(void* data, size_t bytes);
  };

  static void release(void* data);
  c10::DataPtr from_heap(size_t bytes);
  void count_used(ptrdiff_t bytes) noexcept;
  void* find(size_t bytes);
  // Returns blocks to the system, oldest freed first, until at most `bytes` are kept.
  void shrink(size_t bytes);

  mutable std::mutex mutex_;
  std::list<Block> kept_;  // in the order in which they were freed
  size_t kept_bytes_ = 0;
  std::unordered_map<void*, Block> used_;
  std::atomic<size_t> used_bytes_{0}, used_max_{0};
};

}  // namespace sing
