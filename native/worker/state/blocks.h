// Large blocks of host memory, kept for the next tensors of a software device.
//
// Note [Blocks]. Each step of training allocates and frees the same hundreds of megabytes. Memory
// that goes back to the system comes again page by page, each cleared first, and with a snapshot
// beside it the two compete for fresh pages. So what is freed is kept, as a GPU's caching allocator
// keeps it. Blocks in use and kept never take more together than blocks in use have taken before:
// what finds no block that fits first gives back as much as it takes.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <list>
#include <mutex>
#include <unordered_map>

namespace sing {

// Thread-safe.
class Blocks final : public c10::Allocator {
 public:
  static constexpr size_t kLeastBytes = 32 << 20;  // smaller ones are the heap's
  static constexpr size_t kKeptBytes = size_t{1} << 30;

  // The one of this process; it never ends.
  static Blocks& get();
  // Makes it the allocator of all tensors on the CPU.
  void install();

  // Throws c10::Error if there is no memory.
  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t bytes) const override;

  // Bytes that are kept and not in use.
  size_t kept() const;
  // Gives all of them back.
  void empty();

 private:
  struct Block {
    void* data;
    size_t bytes;
  };

  static void release(void* data);
  void* find(size_t bytes);
  // Gives back the blocks that were freed first until `bytes` are kept at most.
  void shrink(size_t bytes);

  mutable std::mutex mutex_;
  std::list<Block> kept_;  // by when they were freed
  size_t kept_bytes_ = 0;
  std::unordered_map<void*, size_t> used_;
};

}  // namespace sing
