// Finds when in a program's steps its state is best copied.
//
// Note [Rhythm]. Training changes the same storages in every step, most of them in one burst at its
// end. A copy that begins right after the burst has nearly a whole step's time before the next one
// catches up with it, and the program hardly waits; one that begins right before it has none. The
// start of a step is not announced. But the longest stretch of records that change no storage again
// lies between two bursts, and its length is known from the time since the last snapshot.
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
  // Notes that the current record changes a large storage that was changed before.
  void changed_again() noexcept;

  // --- any other thread, one at a time ---
  // Waits for the end of a burst. Returns early if nothing has changed for longer than the usual
  // time between two bursts, if `enough`, which is polled, returns true, or after a time limit.
  void await_burst(const std::function<bool()>& enough);
  // Ends the wait.
  void ring() noexcept;
  bool awaited() const noexcept { return pause_.load() != 0; }

 private:
  std::atomic<uint64_t> records_{0};
  std::atomic<uint64_t> last_{0};     // record that changed something again
  std::atomic<uint64_t> longest_{0};  // longest stretch without one since the last wait
  std::atomic<uint64_t> pause_{0};    // a stretch of this length is more than a gap in a burst
  std::atomic<uint64_t> due_{0};      // record at which it is reached; 0: no waiter
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace sing
