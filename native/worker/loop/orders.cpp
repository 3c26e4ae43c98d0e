#include "worker/loop/orders.h"

#include <sched.h>

#include <utility>

#include "oplog/futex.h"

namespace sing {

bool Orders::await_open() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return open_ || end_; });
  return !end_;
}

void Orders::begin_run() {
  std::lock_guard lock(mutex_);
  running_ = true;
  page_.gate_open.store(allowed(), std::memory_order_release);
}

void Orders::finish_run() {
  std::lock_guard lock(mutex_);
  running_ = false;
  changed_.notify_all();
}

void Orders::update() noexcept {
  pending_.store(!allowed() || end_ || works_ != 0, std::memory_order_seq_cst);
}

bool Orders::leaves() {
  std::lock_guard lock(mutex_);
  return !end_ && open_ && !allowed();
}

bool Orders::pauses() {
  std::lock_guard lock(mutex_);
  return !end_ && allowed() && works_ != 0;
}

bool Orders::obey(const std::function<void(bool)>& resumed, std::chrono::nanoseconds pause,
                  std::function<void()> rests) {
  std::unique_lock lock(mutex_);
  bool only_work = true;
  while (!end_ && (!allowed() || works_ != 0)) {
    only_work &= allowed();
    parked_ = true;
    page_.gate_open.store(0, std::memory_order_release);
    changed_.notify_all();
    if (!rests) {
      changed_.wait(lock);
    } else if (changed_.wait_for(lock, pause) == std::cv_status::timeout) {
      lock.unlock();
      std::exchange(rests, {})();
      lock.lock();
    }
  }
  parked_ = false;
  page_.gate_open.store(allowed() && !end_, std::memory_order_release);
  if (resumed && !end_) resumed(only_work);
  changed_.notify_all();
  return !end_;
}

void Orders::sleep(const Word<uint64_t>& word, uint64_t seen, std::chrono::nanoseconds limit,
                   Rest how) {
  sleeps_on_.store(&word, std::memory_order_seq_cst);
  page_.asleep.store(static_cast<uint32_t>(how), std::memory_order_seq_cst);
  // The client changes the word, and other threads give orders, before they check whether this
  // thread sleeps. So one of the two sees the other.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!poked_.load(std::memory_order_seq_cst) && word.load(std::memory_order_seq_cst) == seen &&
      !pending_.load(std::memory_order_seq_cst)) {
    futex_wait(low_half(word), static_cast<uint32_t>(seen), limit);
  }
  poked_.store(false, std::memory_order_seq_cst);  // the caller looks for what was to be seen
  page_.asleep.store(static_cast<uint32_t>(Rest::awake), std::memory_order_relaxed);
  sleeps_on_.store(nullptr, std::memory_order_release);
}

// Wakes the main thread if it sleeps. This thread must not change the word, so a wake between the
// main thread's last check of pending_ and its sleep is lost. Therefore repeat until it is woken,
// or is awake: then it sees pending_ before it sleeps again. That gap is a few instructions long.
void Orders::nudge() noexcept {
  if (notify_) notify_();
  while (const Word<uint64_t>* word = sleeps_on_.load(std::memory_order_seq_cst)) {
    if (futex_wake(low_half(*word)) > 0) return;
    sched_yield();
  }
}

void Orders::gate(bool open) {
  std::lock_guard lock(mutex_);
  open_ = open;
  update();
  changed_.notify_all();
  nudge();
}

void Orders::lease(uint64_t token, bool given) {
  std::lock_guard lock(mutex_);
  if (token < token_) return;
  token_ = token;
  leased_ = given;
  update();
  changed_.notify_all();
  nudge();
}

bool Orders::await_parked() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return parked_ || !running_ || leased_ || end_; });
  return parked_ || !running_;
}

void Orders::await_resumed() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock,
                [this] { return !parked_ || !running_ || !allowed() || works_ != 0 || end_; });
}

bool Orders::await_over(uint64_t token, std::chrono::steady_clock::time_point end) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, end, [&] { return token_ > token || !leased_ || end_; });
}

void Orders::replaying(bool on) {
  std::lock_guard lock(mutex_);
  replaying_ = on;
  update();
  changed_.notify_all();
}

void Orders::end() {
  std::lock_guard lock(mutex_);
  end_ = true;
  update();
  changed_.notify_all();
  nudge();
}

void Orders::wake() {
  std::lock_guard lock(mutex_);
  poked_.store(true, std::memory_order_seq_cst);
  nudge();
}

void Orders::while_parked(const std::function<void()>& work) {
  std::unique_lock lock(mutex_);
  ++works_;
  update();
  nudge();
  changed_.wait(lock, [this] { return parked_ || !running_; });
  try {
    work();
  } catch (...) {
    --works_;
    update();
    changed_.notify_all();
    throw;
  }
  --works_;
  update();
  changed_.notify_all();
}

}  // namespace sing
