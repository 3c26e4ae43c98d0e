// Orders to a worker, and its sleep. The main thread executes records and checks for orders between
// two of them. Any other thread may close the gate, take the lease, end the run, or run work while
// the main thread is parked. The agent uses the gate for its work on the session's state; the lease
// is the scheduler's permission to use the device. Records are executed only with both.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <utility>

#include "oplog/layout.h"

namespace sing {

class Orders {
 public:
  // `notify`, if any: called when orders have come, besides waking the main thread from its sleep.
  explicit Orders(WorkerPage& page, std::function<void()> notify = {})
      : page_(page), notify_(std::move(notify)) {}
  Orders(const Orders&) = delete;
  Orders& operator=(const Orders&) = delete;

  // --- the main thread ---
  // Waits until the gate is open, without touching the page; called before begin_run. Returns false
  // if the run is to end.
  bool await_open();
  void begin_run();
  void finish_run();
  bool pending() const noexcept { return pending_.load(std::memory_order_relaxed); }
  // True if the gate is open but the lease is not given: another session may have the device now.
  bool leaves();
  // True if the main thread is to park only for other threads' work.
  bool pauses();
  // Parks while execution is not allowed or other threads' work runs. Returns false if the run is
  // to end; otherwise, before others see that it continues, calls `resumed`, with true if it was
  // parked only for their work. Calls `rests` once no order has come for `pause`.
  bool obey(const std::function<void(bool)>& resumed = {}, std::chrono::nanoseconds pause = {},
            std::function<void()> rests = {});
  // Sleeps until the client changes `word` from `seen` (when napping: by a request), until orders
  // come, or until `limit` has passed. May return spuriously.
  void sleep(const Word<uint64_t>& word, uint64_t seen,
             std::chrono::nanoseconds limit = std::chrono::nanoseconds::max(),
             Rest how = Rest::asleep);

  // --- any thread ---
  void gate(bool open);
  // Gives or takes the lease. A token lower than one already seen is stale and changes nothing.
  void lease(uint64_t token, bool given);
  // Waits until nothing is executed, or a lease is given again: then returns false.
  bool await_parked();
  // After work: waits until the main thread continues, or stays parked for another reason.
  void await_resumed();
  // Waits until the lease with this token is over, at most until `end`. Returns false if it is not
  // over.
  bool await_over(uint64_t token, std::chrono::steady_clock::time_point end);
  // Marks a replay, during which no lease is needed.
  void replaying(bool on);
  void end();
  bool ended() const noexcept { return end_.load(std::memory_order_relaxed); }
  // Wakes a main thread that sleeps, or ends its next sleep at once.
  void wake();
  // Runs `work` while the main thread is parked between two records, or is not running at all.
  void while_parked(const std::function<void()>& work);

 private:
  bool allowed() const noexcept { return open_ && (leased_ || replaying_); }
  void update() noexcept;
  void nudge() noexcept;

  WorkerPage& page_;
  const std::function<void()> notify_;
  std::atomic<bool> pending_{false};
  std::atomic<bool> poked_{false};  // by wake()
  // The word on which the main thread sleeps, or is about to sleep.
  std::atomic<const Word<uint64_t>*> sleeps_on_{nullptr};
  std::mutex mutex_;  // everything below
  std::condition_variable changed_;
  bool open_ = true;
  bool leased_ = true;
  bool replaying_ = false;
  uint64_t token_ = 0;
  std::atomic<bool> end_{false};
  bool running_ = false;
  bool parked_ = false;
  int works_ = 0;
};

}  // namespace sing
