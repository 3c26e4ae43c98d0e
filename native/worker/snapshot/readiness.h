// Which extents of a snapshot already have their bytes: when a snapshot is read back from disk,
// they arrive in the arena while the worker runs.
//
// A file that the agent makes. It begins with a futex word that the agent rings after progress.
// From the second page on it has one byte for each extent, in the order of the snapshot's index
// (ArrivalState), written by the agent. From the next page on it has one byte for each, written by
// the worker: 1 if the extent is needed now.
#pragma once

#include <cstdint>

#include "oplog/mapping.h"

namespace sing {

enum class Arrival : uint8_t { missing = 0, there = 1, failed = 2 };

class Readiness {
 public:
  Readiness(int fd, uint64_t extents);

  Arrival of(uint64_t index) const noexcept { return Arrival{states()[index].load()}; }
  bool complete() const noexcept;
  void want(uint64_t index) noexcept;
  // Current value of the bell. Read it, check the extents, then wait() with it.
  uint32_t seen() const noexcept { return bell().load(); }
  // Waits until the bell has changed or wake() was called. May return spuriously.
  void wait(uint32_t seen) const noexcept;
  void wake() const noexcept;

 private:
  const Word<uint32_t>& bell() const noexcept {
    return *reinterpret_cast<const Word<uint32_t>*>(mapping_.data());
  }
  Word<uint8_t>* states() const noexcept {
    return reinterpret_cast<Word<uint8_t>*>(mapping_.data() + kPageBytes);
  }

  uint64_t extents_;
  uint64_t wanted_;  // where those bytes begin
  Mapping mapping_;
};

}  // namespace sing
