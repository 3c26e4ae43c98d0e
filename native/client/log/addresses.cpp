#include "client/log/addresses.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include <c10/util/Exception.h>

namespace sing::client {

namespace {
constexpr size_t kReservationBytes = size_t{1} << 44;
}  // namespace

Addresses::Addresses() {
  void* reserved = mmap(nullptr, kReservationBytes, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(reserved != MAP_FAILED, "cannot reserve device addresses: ", std::strerror(errno));
  reservation_ = static_cast<std::byte*>(reserved);
}

// Uses size classes with three significant bits, so that freed ranges are reused soon.
std::byte* Addresses::take(uint64_t bytes, uint32_t& size_class) {
  if (bytes == 0) {
    size_class = 0;
    return nullptr;
  }
  const uint64_t blocks = charged_bytes(bytes) / kChargeBytes;
  const int shift = std::max(0, static_cast<int>(std::bit_width(blocks)) - 3);
  const uint64_t rounded = ((blocks + (uint64_t{1} << shift) - 1) >> shift) << shift;
  size_class = static_cast<uint32_t>(shift) * 16 + static_cast<uint32_t>(rounded >> shift);
  auto& list = free_[size_class];
  if (!list.empty()) {
    std::byte* address = list.back();
    list.pop_back();
    return address;
  }
  const uint64_t span = rounded * kChargeBytes;
  TORCH_CHECK(used_ + span <= kReservationBytes, "out of device addresses");
  std::byte* address = reservation_ + used_;
  used_ += span;
  return address;
}

void Addresses::give(std::byte* address, uint32_t size_class) {
  if (address != nullptr) free_[size_class].push_back(address);
}

}  // namespace sing::client
