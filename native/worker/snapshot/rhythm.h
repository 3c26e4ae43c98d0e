// When in a program's steps its state is best copied.
//
// Note [Rhythm]. Training changes the same storages in every step, most of them in one burst at its
// end. A copy that begins right after the burst has nearly a whole step's time before the next one
// catches up with it, and the program hardly waits; one that begins right before it has none.
// Nobody tells where steps begin. But between two bursts lies the longest stretch of records that
// change nothing again, and how long it is was seen since the last time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>

namespace sing {

class Rhythm {
 public:
  // --- the main thread ---
  void record() noexcept {
    const uint64_t now = records_.load(std::memory_order_relaxed) + 1;
    records_.store(now, std::memory_order_relaxed);
    if (now == due_.load(std::memory_order_relaxed)) ring();
  }
  // The record in hand changes a large storage that was changed before.
  void changed_again() noexcept;

  // --- any other thread, one at a time ---
  // Returns after a burst, or when nothing has changed for longer than between two of them, or when
  // `enough` says so, which is asked now and then, or after a while.
  void await_burst(const std::function<bool()>& enough);
  // Ends the wait.
  void ring() noexcept;
  bool awaited() const noexcept { return pause_.load() != 0; }

 private:
  std::atomic<uint64_t> records_{0};
  std::atomic<uint64_t> last_{0};     // record that changed something again
  std::atomic<uint64_t> longest_{0};  // stretch without one since it was last waited for
  std::atomic<uint64_t> pause_{0};    // so long a stretch is more than a gap in a burst
  std::atomic<uint64_t> due_{0};      // when that was reached; 0: nobody waits
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace sing
