// Orders to a worker, and its sleep: the main thread executes records and looks here between two
// of them; any other thread may close the gate, take the lease, end the run, or have something done
// meanwhile. The gate is the agent's, for what it does with the session's state; the lease is the
// scheduler's permission to use the device. Records are executed only with both.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>

#include "oplog/layout.h"

namespace sing {

class Orders {
 public:
  explicit Orders(WorkerPage& page) : page_(page) {}
  Orders(const Orders&) = delete;
  Orders& operator=(const Orders&) = delete;

  // --- the main thread ---
  // Before begin_run, without touching the page: until the gate is open. False: the run is to end.
  bool await_open();
  void begin_run();
  void finish_run();
  bool pending() const noexcept { return pending_.load(std::memory_order_relaxed); }
  // Whether the device was given to somebody else.
  bool leaves();
  // Parks while the gate is closed or something is done meanwhile. False: the run is to end.
  bool obey();
  // Sleeps until the client changes `word` from `seen` (of a nap: by a request), or orders come, or
  // for no reason; or for as long as `limit`.
  void sleep(const Word<uint64_t>& word, uint64_t seen,
             std::chrono::nanoseconds limit = std::chrono::nanoseconds::max(),
             Rest how = Rest::asleep);

  // --- any thread ---
  void gate(bool open);
  // Gives or takes the lease. A token below one that was seen is stale, and changes nothing.
  void lease(uint64_t token, bool given);
  // Waits until nothing is executed, or a lease is given again.
  void await_parked();
  // Waits until the lease with this token is over, or until then; false if it is not.
  bool await_over(uint64_t token, std::chrono::steady_clock::time_point end);
  // While a replay goes on no lease is needed.
  void replaying(bool on);
  void end();
  bool ended() const noexcept { return end_.load(std::memory_order_relaxed); }
  // Lets a main thread that sleeps look around.
  void wake();
  // Runs `work` while the main thread is parked between two records, or is not running at all.
  void while_parked(const std::function<void()>& work);

 private:
  bool allowed() const noexcept { return open_ && (leased_ || replaying_); }
  void update() noexcept;
  void nudge() noexcept;

  WorkerPage& page_;
  std::atomic<bool> pending_{false};
  // The word that the main thread sleeps on, or is about to.
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
