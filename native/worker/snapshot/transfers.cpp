#include "worker/snapshot/transfers.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "worker/exec/failures.h"
#include "worker/loop/clock.h"
#include "worker/state/mapped.h"
#include "worker/state/storages.h"

namespace sing {

namespace {

// Maximum piece size of a gentle thread: the main thread may have to wait for such a piece.
constexpr uint64_t kGentleBytes = 1 << 20;
constexpr int kGentleNice = 10;

bool is_host(c10::Device device) { return device.type() == c10::DeviceType::CPU; }

void become_gentle() {
  const auto thread = static_cast<id_t>(syscall(SYS_gettid));
  setpriority(PRIO_PROCESS, thread, getpriority(PRIO_PROCESS, thread) + kGentleNice);
}

}  // namespace

Transfer::Transfer(Transfers& owner, c10::Storage storage, Extent extent)
    : owner(owner),
      extent(extent),
      storage(std::move(storage)),
      data_(is_host(this->storage.device()) ? static_cast<std::byte*>(this->storage.mutable_data())
                                            : nullptr),
      mapped_(is_mapped(this->storage)) {}

Transfers::Transfers(Direction direction, Arena& arena, c10::Device device, uint64_t piece_bytes)
    : direction_(direction), arena_(arena), device_(device), piece_bytes_(piece_bytes) {}

Transfers::~Transfers() { reset(); }

TransferPtr Transfers::add(c10::Storage storage, Extent extent) {
  auto transfer = std::make_shared<Transfer>(*this, std::move(storage), extent);
  std::lock_guard lock(mutex_);
  ++unfinished_;
  left_ += extent.count;
  return transfer;
}

void Transfers::schedule(std::vector<TransferPtr> order) {
  std::lock_guard lock(mutex_);
  queue_.assign(std::make_move_iterator(order.begin()), std::make_move_iterator(order.end()));
  if (published_) published_->store(left_, std::memory_order_relaxed);
}

void Transfers::help(unsigned threads, Pace pace) {
  std::lock_guard lock(mutex_);
  if (cancelled_ || failure_) return;
  threads = static_cast<unsigned>(std::min<size_t>(threads, unfinished_));
  for (unsigned i = 0; i < threads; ++i) {
    threads_.emplace_back([this, pace] { work(pace); });
    ++helping_;
  }
}

void Transfers::finish() {
  {
    Lock lock(mutex_);
    changed_.wait(lock, [this] { return unfinished_ == 0 || cancelled_ || failure_; });
    if (unfinished_ != 0 && !failure_) {
      failure_ = std::make_exception_ptr(std::runtime_error("it was ended before it was done"));
    }
  }
  join();
  std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  cancelled_ = false;
}

void Transfers::give_up() noexcept {
  cancel();
  join();
  std::lock_guard lock(mutex_);
  queue_.clear();
  absent_.clear();
  forget_flights();
}

void Transfers::reset() noexcept {
  give_up();
  std::lock_guard lock(mutex_);
  cancelled_ = false;
  failure_ = nullptr;
}

void Transfers::await_arrivals() {
  Lock lock(mutex_);
  changed_.wait(lock, [this] {
    return unfinished_ == 0 || cancelled_ || failure_ || !readiness_ || readiness_->complete();
  });
  if (failure_) std::rethrow_exception(failure_);
  if (cancelled_) throw LoadFailed("it was ended before all state was loaded");
}

void Transfers::rethrow() {
  std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

void Transfers::cancel() noexcept {
  std::lock_guard lock(mutex_);
  if (unfinished_ == 0) return;
  cancelled_ = true;
  changed_.notify_all();
}

// Waits for the helper threads to end. They end when nothing is left that they could take.
void Transfers::join() noexcept {
  std::vector<std::thread> ended;
  {
    Lock lock(mutex_);
    while (helping_ != 0) {
      if (readiness_ && (cancelled_ || failure_)) {
        // This thread must not change the readiness file's bell, so a wake between the helper's
        // check of it and its sleep is lost. Therefore repeat.
        readiness_->wake();
        changed_.wait_for(lock, std::chrono::milliseconds(1));
      } else {
        changed_.wait(lock);
      }
    }
    ended.swap(threads_);
  }
  for (std::thread& thread : ended) thread.join();
}

void Transfers::settle(const TransferPtr& transfer) {
  if (!transfer->finished() || transfer->copied_) {
    const uint64_t began = monotonic_ns();
    Lock lock(mutex_);
    urgent_ = transfer;
    try {
      if (copies_) {
        const bool save = direction_ == Direction::save;
        EventPtr began = save ? record_time(device_) : nullptr;
        await_started(lock, transfer, /*finished=*/true);
        save ? lost_.add(std::move(began), record_time(device_)) : follow(*transfer);
      } else {
        await_moved(lock, transfer);
      }
    } catch (...) {
      fail();
    }
    urgent_.reset();
    if (copies_) changed_.notify_all();
    settling_ns_ += monotonic_ns() - began;
  }
  if (transfer->finished()) return;
  if (direction_ == Direction::save) {
    drop(transfer);
    return;
  }
  rethrow();
  throw LoadFailed("it was ended before all state was loaded");
}

void Transfers::await_moved(Lock& lock, const TransferPtr& transfer) {
  while (!transfer->finished() && !cancelled_ && !failure_) {
    if (!arrived(*transfer)) {
      readiness_->want(transfer->index);
      changed_.wait(lock);
    } else if (direction_ == Direction::load && transfer->mapped_) {
      leave(*transfer);  // a helper thread that faults its pages in is nearly done
      if (!transfer->finished()) changed_.wait(lock);
    } else if (const auto piece = claim(transfer, piece_bytes_)) {
      move_unlocked(lock, *piece);
    } else {
      changed_.wait(lock);
    }
  }
}

void Transfers::drop(const TransferPtr& transfer) noexcept {
  c10::Storage held;  // freed after the lock is released
  std::lock_guard lock(mutex_);
  if (!transfer->finished()) held = leave(*transfer);
}

// Marks the rest as taken, so that no thread takes any more of it.
c10::Storage Transfers::leave(Transfer& transfer) {
  const uint64_t unclaimed = transfer.extent.count - transfer.claimed_;
  transfer.claimed_ = transfer.extent.count;
  return note_moved(transfer, unclaimed);
}

void Transfers::work(Pace pace) noexcept {
  const c10::DeviceGuard device(device_);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::NoGradGuard no_grad;
  Lock lock(mutex_);
  try {
    if (copies_) {
      work_on_device(lock);
    } else {
      work_on_host(lock, pace);
    }
  } catch (...) {
    fail();
  }
  --helping_;
  changed_.notify_all();
}

void Transfers::work_on_host(Lock& lock, Pace pace) {
  bool gentle = false;
  const uint64_t most = pace == Pace::gentle ? std::min(kGentleBytes, piece_bytes_) : piece_bytes_;
  while (const auto piece = next(lock, most)) {
    if (pace == Pace::gentle && !gentle && !piece->transfer->soon) {
      become_gentle();  // permanently; storages that are needed soon come first
      gentle = true;
    }
    move_unlocked(lock, *piece);
  }
}

std::optional<Transfers::Piece> Transfers::next(Lock& lock, uint64_t most) {
  while (!cancelled_ && !failure_) {
    if (auto piece = next_arrived(most)) return piece;
    if (absent_.empty()) return std::nullopt;
    look_for_arrivals(lock);
  }
  return std::nullopt;
}

std::optional<Transfers::Piece> Transfers::next_arrived(uint64_t most) {
  if (urgent_ && arrived(*urgent_)) {
    if (auto piece = claim(urgent_, most)) return piece;
  }
  for (; !queue_.empty(); queue_.pop_front()) {
    const TransferPtr& first = queue_.front();
    if (!first->finished() && !arrived(*first)) {
      absent_.push_back(first);
    } else if (auto piece = claim(first, most)) {
      return piece;
    }
  }
  return std::nullopt;
}

std::optional<Transfers::Piece> Transfers::claim(const TransferPtr& transfer, uint64_t most) {
  const uint64_t offset = transfer->claimed_;
  const uint64_t count = std::min(most, transfer->extent.count - offset);
  if (count == 0) return std::nullopt;
  transfer->claimed_ += count;
  return Piece{transfer, offset, count};
}

bool Transfers::arrived(const Transfer& transfer) const {
  if (!readiness_) return true;
  const Arrival arrival = readiness_->of(transfer.index);
  if (arrival == Arrival::failed) throw LoadFailed("a part of the saved state could not be read");
  return arrival == Arrival::there;
}

void Transfers::look_for_arrivals(Lock& lock) {
  const uint32_t seen = readiness_->seen();
  std::erase_if(absent_, [this](TransferPtr& transfer) {
    if (!transfer->finished() && !arrived(*transfer)) return false;
    queue_.push_back(std::move(transfer));
    return true;
  });
  if (!queue_.empty()) return;
  lock.unlock();
  readiness_->wait(seen);
  lock.lock();
  changed_.notify_all();  // the main thread may wait for one that has arrived now
}

void Transfers::move_unlocked(Lock& lock, const Piece& piece) {
  lock.unlock();
  try {
    move(piece);
  } catch (...) {
    lock.lock();
    note_failed(piece);
    throw;
  }
  lock.lock();
  release_unlocked(lock, note_moved(*piece.transfer, piece.count));
}

// A save that fails is over, so that no thread waits for it. What was not loaded stays so.
void Transfers::note_failed(const Piece& piece) noexcept {
  if (direction_ == Direction::save) note_moved(*piece.transfer, piece.count);
}

// Frees the storage, which takes a while if it is large.
void Transfers::release_unlocked(Lock& lock, c10::Storage held) {
  if (!held) return;
  lock.unlock();
  held = c10::Storage();
  lock.lock();
}

void Transfers::move(const Piece& piece) {
  const Transfer& transfer = *piece.transfer;
  const uint64_t at = transfer.extent.offset + piece.offset;
  const std::span<std::byte> bytes(transfer.data_ + piece.offset, piece.count);
  if (direction_ == Direction::save) {
    arena_.write(at, bytes);
  } else if (transfer.mapped_) {
    populate(bytes);
  } else {
    arena_.read(at, bytes);
  }
}

// Counts moved bytes. Returns the storage that the transfer kept alive, if it is now finished.
c10::Storage Transfers::note_moved(Transfer& transfer, uint64_t count) {
  transfer.moved_ += count;
  left_ -= count;
  if (published_) published_->store(left_, std::memory_order_relaxed);
  if (transfer.moved_ < transfer.extent.count) return {};
  c10::Storage held;
  if (direction_ == Direction::save) std::swap(held, transfer.storage);
  transfer.finished_.store(true, std::memory_order_release);
  --unfinished_;
  if (unfinished_ == 0 || urgent_.get() == &transfer) changed_.notify_all();
  return held;
}

// To be called while an exception is handled.
void Transfers::fail() noexcept {
  changed_.notify_all();
  if (failure_) return;
  failure_ = std::current_exception();
  if (on_failure_) on_failure_();
}

}  // namespace sing
