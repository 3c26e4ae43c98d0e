// Which extents of a snapshot have their bytes: those of one that was brought in from disk arrive
// in the arena while the worker runs already.
//
// A file that the agent makes: a futex word that it rings after progress; from the second page on,
// one byte for each extent in the order of the snapshot's index (ArrivalState), written by the
// agent; from the next page on, one byte for each, written by the worker: 1 for one wanted now.
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
  // A value of the bell, to wait from: look, and then wait.
  uint32_t seen() const noexcept { return bell().load(); }
  // Until the bell has moved on, or wake(), or for no reason.
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
