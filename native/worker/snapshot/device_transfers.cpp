// Transfers of a device: its copies are on a stream of their own. See Note [Copy streams].
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "worker/loop/clock.h"
#include "worker/snapshot/transfers.h"
#include "worker/state/storages.h"

namespace sing {

void Transfers::begin() {
  if (device_.is_cpu()) return;
  std::lock_guard lock(mutex_);
  if (!copies_) copies_.emplace(device_, piece_bytes_);
  copies_->follow();
}

uint64_t Transfers::take_lost_ns() {
  LostTime taken;
  {
    Lock lock(mutex_);
    changed_.wait(lock, [this] { return !urgent_; });  // a wait that has not ended
    std::swap(taken, lost_);
  }
  return taken.take_ns();
}

// Keeps the stream's queue filled as far as there are buffers, and moves on what has been copied.
void Transfers::work_on_device(Lock& lock) {
  while (!cancelled_ && !failure_) {
    const bool room = copies_->has_buffer();
    if (const auto piece = room ? next_arrived(piece_bytes_) : std::nullopt) {
      start(lock, *piece);
    } else if (!flights_.empty()) {
      land(lock);
    } else if (!room) {
      changed_.wait(lock);  // other threads have all the buffers
    } else if (!absent_.empty()) {
      look_for_arrivals(lock);
    } else {
      return;
    }
  }
}

// Puts the copy of a piece into the stream's queue. Needs a buffer.
void Transfers::start(Lock& lock, const Piece& piece) {
  Transfer& transfer = *piece.transfer;
  Flight flight{piece, {}, {}};
  try {
    flight.buffer = copies_->take_buffer();
    if (direction_ == Direction::save) {
      flight.copied =
          copies_->start_out(transfer.storage, piece.offset, piece.count, flight.buffer);
    }
  } catch (...) {
    if (flight.buffer.defined()) copies_->give_back(std::move(flight.buffer));
    note_failed(piece);
    throw;
  }
  if (direction_ == Direction::load) {
    lock.unlock();
    try {
      arena_.read(transfer.extent.offset + piece.offset, span_of(flight.buffer).first(piece.count));
    } catch (...) {
      lock.lock();
      throw;
    }
    lock.lock();
    flight.copied = copies_->start_in(transfer.storage, piece.offset, piece.count, flight.buffer);
  }
  transfer.started_ += piece.count;
  if (transfer.started_ == transfer.extent.count) transfer.copied_ = flight.copied;
  flights_.push_back(std::move(flight));
  // What is loaded may be used: the computing stream will wait for it.
  if (direction_ == Direction::load) note_moved(transfer, piece.count);
  changed_.notify_all();
}

// Waits for the oldest copy, and gives its buffer back.
void Transfers::land(Lock& lock) {
  Flight flight = std::move(flights_.front());
  flights_.pop_front();
  lock.unlock();
  try {
    flight.copied->synchronize();
    if (direction_ == Direction::save) {
      arena_.write(flight.piece.transfer->extent.offset + flight.piece.offset,
                   span_of(flight.buffer).first(flight.piece.count));
    }
  } catch (...) {
    lock.lock();
    copies_->give_back(std::move(flight.buffer));
    note_failed(flight.piece);
    throw;
  }
  lock.lock();
  copies_->give_back(std::move(flight.buffer));
  changed_.notify_all();
  if (direction_ == Direction::load) return;
  release_unlocked(lock, note_moved(*flight.piece.transfer, flight.piece.count));
}

void Transfers::await_started(Lock& lock, const TransferPtr& transfer, bool finished) {
  while (!cancelled_ && !failure_) {
    if (transfer->finished()) return;
    if (!finished && transfer->started_ == transfer->extent.count) return;
    if (!arrived(*transfer)) {
      readiness_->want(transfer->index);
      changed_.wait(lock);
      continue;
    }
    const auto piece =
        copies_->has_buffer() ? claim(transfer, piece_bytes_) : std::optional<Piece>();
    if (piece) {
      start(lock, *piece);
    } else if (!flights_.empty()) {
      land(lock);
    } else {
      changed_.wait(lock);
    }
  }
}

// Has the computing stream wait for what was copied.
void Transfers::follow(Transfer& transfer) {
  if (!transfer.copied_ || transfer.followed_) return;
  transfer.followed_ = true;
  if (transfer.copied_->query()) return;
  copies_->let_computing_wait(*transfer.copied_);
}

void Transfers::settle_for_kernels(const TransferPtr& transfer) {
  if (!copies_ || direction_ == Direction::load) return settle(transfer);
  if (transfer->followed_ || transfer->finished()) return;
  const uint64_t began = monotonic_ns();
  {
    Lock lock(mutex_);
    urgent_ = transfer;
    try {
      if (transfer->copied_ && transfer->copied_->query()) {
        transfer->followed_ = true;
      } else {
        EventPtr began = record_time(device_);
        await_started(lock, transfer, /*finished=*/false);
        follow(*transfer);
        lost_.add(std::move(began), record_time(device_));
      }
    } catch (...) {
      fail();
    }
    urgent_.reset();
    changed_.notify_all();
  }
  settling_ns_ += monotonic_ns() - began;
  if (!transfer->followed_ && !transfer->finished()) drop(transfer);
}

// Of a save or load that was given up. The threads have ended.
void Transfers::forget_flights() noexcept {
  for (Flight& flight : flights_) {
    try {
      flight.copied->synchronize();
    } catch (const std::exception&) {  // a lost device copies nothing any more
    }
    copies_->give_back(std::move(flight.buffer));
    if (direction_ == Direction::save) note_moved(*flight.piece.transfer, flight.piece.count);
  }
  flights_.clear();
}

}  // namespace sing
