// Records that failed for lack of memory fail again when the log is executed again.
//
// Note [Memory failures]: other operators fail in each execution or in none. One that found no
// memory may find some the next time, and would then change what the notebook has seen unchanged.
// So the positions of these records are in the worker's page, which outlives the worker. A position
// is written there before the notebook can see the failure. Those below `retained` are in a
// snapshot, and make room for others. If there is no room, a recovery may give other values, and is
// reported as approximate (Note [Exactness]).
//
// A record that found memory before and finds none when it is executed again does not fail: the run
// ends (NoRoom), and another worker tries again when there is memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "oplog/layout.h"

namespace sing {

class MemoryFailures {
 public:
  MemoryFailures(WorkerPage& page, const AgentPage& agent) : page_(page), agent_(agent) {}

  // To be called when this process becomes the session's worker.
  void open() noexcept {
    count_ = std::min<uint64_t>(page_.memory_failures.load(), kMemoryFailuresMax);
    end_ = count_ == 0 ? 0 : page_.memory_failed[count_ - 1].load() + 1;
  }

  // True if the record at `position` has failed before.
  bool has(uint64_t position) const noexcept {
    if (position >= end_) [[likely]]
      return false;
    for (uint64_t i = 0; i < count_; ++i) {
      if (page_.memory_failed[i].load(std::memory_order_relaxed) == position) return true;
    }
    return false;
  }
  // True if it may have failed before, although it is not listed.
  bool may_have(uint64_t position) const noexcept {
    return position < page_.memory_unlisted.load();
  }
  // To be called for a record that is not listed. Returns false if there is no room for it.
  bool add(uint64_t position) noexcept {
    if (count_ == kMemoryFailuresMax) forget();
    if (count_ == kMemoryFailuresMax) {
      page_.memory_unlisted.store(position + 1);
      return false;
    }
    page_.memory_failed[count_].store(position, std::memory_order_relaxed);
    page_.memory_failures.store(++count_, std::memory_order_release);
    end_ = position + 1;
    return true;
  }

 private:
  // If the worker dies meanwhile, some positions are there twice, and none is missing.
  void forget() noexcept {
    const uint64_t retained = agent_.retained.load(std::memory_order_acquire);
    uint64_t kept = 0;
    for (uint64_t i = 0; i < count_; ++i) {
      const uint64_t position = page_.memory_failed[i].load(std::memory_order_relaxed);
      if (position >= retained) page_.memory_failed[kept++].store(position);
    }
    count_ = kept;
    page_.memory_failures.store(kept, std::memory_order_release);
  }

  WorkerPage& page_;
  const AgentPage& agent_;
  uint64_t count_ = 0;  // as in the page, which only this process writes
  uint64_t end_ = 0;    // all listed positions are below
};

}  // namespace sing
