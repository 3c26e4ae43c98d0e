#include "worker/snapshot/readiness.h"

#include "oplog/futex.h"

namespace sing {

Readiness::Readiness(int fd, uint64_t extents)
    : extents_(extents),
      wanted_(kPageBytes + (extents + kPageBytes - 1) / kPageBytes * kPageBytes),
      mapping_(map_file(fd, wanted_ + extents, true)) {}

bool Readiness::complete() const noexcept {
  for (uint64_t i = 0; i < extents_; ++i) {
    if (of(i) != Arrival::there) return false;
  }
  return true;
}

void Readiness::want(uint64_t index) noexcept {
  reinterpret_cast<Word<uint8_t>*>(mapping_.data() + wanted_)[index].store(1);
}

void Readiness::wait(uint32_t seen) const noexcept { futex_wait(&bell(), seen); }

void Readiness::wake() const noexcept { futex_wake(&bell()); }

}  // namespace sing
