#include "worker/loop/seat.h"

#include <algorithm>
#include <chrono>

#include "worker/loop/clock.h"

namespace sing {

namespace {

// Interval at which the executor looks whether an interrupted turn can continue, when no other turn
// changes that.
constexpr std::chrono::milliseconds kLook{10};
// How long it waits for a session that returns.
constexpr std::chrono::milliseconds kReturns{100};

}  // namespace

void Seat::serve() {
  std::unique_lock lock(mutex_);
  while (Turn* turn = next(lock)) {
    turn->begun = true;
    present_ = turn;
    if (last_ == &turn->orders) left_ns_ = 0;
    last_ = &turn->orders;
    lock.unlock();
    bool interrupted = false, returns = false;
    try {
      interrupted = turn->member.carry_out();
      returns = !interrupted && turn->member.returns();
    } catch (...) {
      turn->failure = std::current_exception();
    }
    const uint64_t left_ns = monotonic_ns();
    lock.lock();
    present_ = nullptr;
    let_go(over_);
    if (interrupted) {
      interrupted_.push_back(turn);
    } else {
      over_ = turn;
      returns_ = returns;
    }
    count_waiting();
    left_ns_ = wanted() ? left_ns : 0;
  }
}

// Waits until the last session returns; null if it does not.
Seat::Turn* Seat::returned(std::unique_lock<std::mutex>& lock) {
  let_go(over_);
  const auto end = std::chrono::steady_clock::now() + kReturns;
  auto found = waiting_.end();
  changed_.wait_until(lock, end, [&] {
    found = std::ranges::find(waiting_, last_, [](Turn* turn) { return &turn->orders; });
    return found != waiting_.end() || last_ == nullptr || ended_;
  });
  returns_ = false;
  if (found == waiting_.end()) return nullptr;
  Turn* turn = *found;
  waiting_.erase(found);
  count_waiting();
  return turn;
}

// Waits for a turn that can begin or continue; returns null at the end.
Seat::Turn* Seat::next(std::unique_lock<std::mutex>& lock) {
  if (returns_) {
    if (Turn* turn = returned(lock)) return turn;
  }
  while (true) {
    const auto asks = std::ranges::find_if(waiting_, &Turn::asks);
    const auto ready = std::find_if(interrupted_.begin(), interrupted_.end(),
                                    [](Turn* turn) { return turn->member.ready(); });
    Turn* turn = nullptr;
    if (asks != waiting_.end()) {
      turn = *asks;
      waiting_.erase(asks);
    } else if (ready != interrupted_.end()) {
      turn = *ready;
      interrupted_.erase(ready);
    } else if (!waiting_.empty()) {
      turn = waiting_.front();
      waiting_.pop_front();
    }
    if (turn) {
      count_waiting();
      return turn;
    }
    let_go(over_);
    left_ns_ = 0;
    if (!interrupted_.empty()) {
      changed_.wait_for(lock, kLook);
    } else if (ended_) {
      return nullptr;
    } else {
      changed_.wait(lock);
    }
  }
}

void Seat::count_waiting() noexcept {
  waiting_count_.store(waiting_.size() + interrupted_.size(), std::memory_order_seq_cst);
  asking_.store(static_cast<size_t>(std::ranges::count_if(waiting_, &Turn::asks)));
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

void Seat::take_turn(Orders& orders, Member& member) {
  Turn turn(orders, member);
  std::unique_lock lock(mutex_);
  waiting_.push_back(&turn);
  count_waiting();
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
    count_waiting();
  }
  if (last_ == &orders && orders.ended()) {
    last_ = nullptr;
    changed_.notify_all();
  }
  if (turn.failure) std::rethrow_exception(turn.failure);
}

// The threads of these sessions stay in take_turn() meanwhile.
void Seat::look() {
  const std::lock_guard lock(mutex_);
  for (Turn* turn : waiting_) turn->asks = turn->member.asks();
  count_waiting();
}

// The same.
void Seat::ask_owners(const ContentId& version) {
  const std::lock_guard lock(mutex_);
  for (Turn* turn : waiting_) turn->member.give_up(version);
  for (Turn* turn : interrupted_) turn->member.give_up(version);
}

Seat::GivingBack::GivingBack(Seat& seat) : seat_(seat) {
  const std::lock_guard lock(seat_.mutex_);
  ++seat_.giving_back_;
}

Seat::GivingBack::~GivingBack() {
  const std::lock_guard lock(seat_.mutex_);
  --seat_.giving_back_;
  seat_.changed_.notify_all();
}

void Seat::await_all_given_back(const Orders& orders) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return giving_back_ == 0 || orders.pending(); });
}

void Seat::notify() {
  const std::lock_guard lock(mutex_);
  for (Turn* turn : waiting_) turn->changed.notify_all();
  changed_.notify_all();
}

}  // namespace sing
