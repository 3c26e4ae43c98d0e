#include "worker/loop/seat.h"

#include <algorithm>

#include "worker/loop/clock.h"

namespace sing {

void Seat::serve() {
  std::unique_lock lock(mutex_);
  while (true) {
    if (waiting_.empty()) let_go(over_);
    changed_.wait(lock, [this] { return ended_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    Turn* turn = waiting_.front();
    waiting_.pop_front();
    waiting_count_.store(waiting_.size(), std::memory_order_relaxed);
    turn->begun = true;
    present_ = turn;
    if (last_ == &turn->orders) left_ns_ = 0;
    last_ = &turn->orders;
    lock.unlock();
    try {
      turn->work();
    } catch (...) {
      turn->failure = std::current_exception();
    }
    const uint64_t left_ns = monotonic_ns();
    lock.lock();
    left_ns_ = waiting_.empty() ? 0 : left_ns;
    present_ = nullptr;
    let_go(over_);
    over_ = turn;
  }
}

void Seat::let_go(Turn*& turn) noexcept {
  if (!turn) return;
  turn->done = true;
  turn->changed.notify_all();
  turn = nullptr;
}

void Seat::end() {
  const std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

void Seat::note_begun() noexcept {
  if (left_ns_ != 0) {
    switches_.fetch_add(1, std::memory_order_relaxed);
    switch_ns_.fetch_add(monotonic_ns() - left_ns_, std::memory_order_relaxed);
  }
  const std::lock_guard lock(mutex_);
  let_go(over_);
}

void Seat::take_turn(Orders& orders, const std::function<void()>& work) {
  Turn turn(orders, work);
  std::unique_lock lock(mutex_);
  waiting_.push_back(&turn);
  waiting_count_.store(waiting_.size(), std::memory_order_seq_cst);
  if (Turn* present = present_) {  // the executor may sleep until its client writes records
    ++present->wakers;
    lock.unlock();
    present->orders.wake();
    lock.lock();
    --present->wakers;
    present->changed.notify_all();
  } else {
    changed_.notify_all();
  }
  turn.changed.wait(
      lock, [&] { return (turn.done && turn.wakers == 0) || (!turn.begun && orders.pending()); });
  if (!turn.begun) {
    std::erase(waiting_, &turn);
    waiting_count_.store(waiting_.size(), std::memory_order_relaxed);
  }
  if (last_ == &orders && orders.ended()) last_ = nullptr;
  if (turn.failure) std::rethrow_exception(turn.failure);
}

bool Seat::wanted() const { return waiting_count_.load(std::memory_order_seq_cst) != 0; }

void Seat::notify() {
  const std::lock_guard lock(mutex_);
  for (Turn* turn : waiting_) turn->changed.notify_all();
}

}  // namespace sing
