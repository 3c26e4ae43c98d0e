// Addresses of device memory in the notebook: distinct, stable, and never readable.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sing::client {

// Storages are accounted in blocks of this size, as in CUDA's caching allocator.
inline constexpr uint64_t kChargeBytes = 512;

inline constexpr uint64_t charged_bytes(uint64_t bytes) noexcept {
  return (bytes + kChargeBytes - 1) / kChargeBytes * kChargeBytes;
}

// Not thread-safe.
class Addresses {
 public:
  // Throws c10::Error if the kernel grants no address space.
  Addresses();

  // Returns an address for `bytes` bytes (null for none) and its size class for `give`. Throws
  // c10::Error when all are taken.
  std::byte* take(uint64_t bytes, uint32_t& size_class);
  void give(std::byte* address, uint32_t size_class);

 private:
  // Three significant bits of a 64-bit number of blocks.
  static constexpr uint32_t kClasses = 64 * 16;

  std::byte* reservation_ = nullptr;  // never unmapped, as sessions are never destroyed
  uint64_t used_ = 0;
  std::array<std::vector<std::byte*>, kClasses> free_;
};

}  // namespace sing::client
