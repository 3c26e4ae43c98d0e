// Moves the bytes of storages between the device and the arena, piece by piece, beside the main
// thread: saving for a snapshot, loading after a start. Storages that are mapped from the arena
// (see mapped.h) have only to arrive there.
//
// The main thread goes on meanwhile. Before it writes a storage that is being saved, or uses one
// that is being loaded, it settles it: it takes pieces itself, and the helping threads take pieces
// of that storage before any other. Whoever frees a storage leaves it to its transfer, which holds
// it until it is saved.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "worker/snapshot/readiness.h"
#include "worker/state/arena.h"

namespace sing {

class Transfers;

// One storage on its way. It is finished once all its bytes have moved, or nobody wants them.
struct Transfer {
  Transfer(Transfers& owner, c10::Storage storage, Extent extent);

  bool finished() const noexcept { return finished_.load(std::memory_order_acquire); }

  Transfers& owner;
  const Extent extent;
  uint64_t index = 0;  // of its extent in the snapshot that is loaded
  bool soon = false;   // its bytes are about to change
  // Of one that is saved: dropped when it is finished.
  c10::Storage storage;

 private:
  friend class Transfers;
  std::byte* data_;  // of the storage, if the host can address it
  bool mapped_;
  std::atomic<bool> finished_{false};
  // The others under the mutex of the owner.
  uint64_t claimed_ = 0;  // bytes that somebody has taken, from the start
  uint64_t moved_ = 0;
};

using TransferPtr = std::shared_ptr<Transfer>;

class Transfers {
 public:
  enum class Direction : uint8_t { save, load };
  // How much helping threads take of the cores: all; or what nobody else wants, but for what the
  // main thread will soon have to wait for.
  enum class Pace : uint8_t { full, gentle };

  Transfers(Direction direction, Arena& arena, c10::Device device, uint64_t piece_bytes);
  ~Transfers();
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  // --- the thread that saves or loads; one at a time ---
  // A new transfer. It may be settled from now on, and is moved by others once it is scheduled.
  TransferPtr add(c10::Storage storage, Extent extent);
  // Everything that was added, in the order to move it.
  void schedule(std::vector<TransferPtr> order);
  void help(unsigned threads, Pace pace);
  // Waits until everything has moved. Throws what went wrong with any of them.
  void finish();
  void rethrow();
  // Waits until all that is to be loaded lies in the arena. LoadFailed.
  void await_arrivals();
  // Ends what is going on; nothing is scheduled any more.
  void reset() noexcept;

  // --- any thread ---
  // Nothing moves any more; finish() throws.
  void cancel() noexcept;
  uint64_t bytes_left() const noexcept { return left_.load(std::memory_order_relaxed); }

  // --- the main thread ---
  // Until it has moved. Of one that cannot be loaded, LoadFailed; of one that cannot be saved,
  // nothing: that is the snapshot's failure.
  void settle(const TransferPtr& transfer);
  void drop(const TransferPtr& transfer) noexcept;
  // Time that settling has taken, in total.
  uint64_t settling_ns() const noexcept { return settling_ns_.load(std::memory_order_relaxed); }

  // Before anything is scheduled.
  void wait_for(Readiness* readiness) { readiness_ = readiness; }
  // Shows bytes_left() to others.
  void publish_left(Word<uint64_t>* word) { published_ = word; }
  // Called by the thread that met the first failure, in the middle of its work: it must not wait.
  void on_failure(std::function<void()> call) { on_failure_ = std::move(call); }

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Piece {
    TransferPtr transfer;
    uint64_t offset;
    uint64_t count;
  };

  void work(Pace pace) noexcept;
  std::optional<Piece> next(Lock& lock, uint64_t most);
  std::optional<Piece> claim(const TransferPtr& transfer, uint64_t most);
  void look_for_arrivals(Lock& lock);
  bool arrived(const Transfer& transfer) const;
  void move(const Piece& piece, at::Tensor& staging);
  void move_unlocked(Lock& lock, const Piece& piece, at::Tensor& staging);
  c10::Storage note_moved(Transfer& transfer, uint64_t count);
  c10::Storage leave(Transfer& transfer);
  void fail() noexcept;
  void join() noexcept;

  const Direction direction_;
  Arena& arena_;
  const c10::Device device_;
  const uint64_t piece_bytes_;
  Readiness* readiness_ = nullptr;
  Word<uint64_t>* published_ = nullptr;
  std::function<void()> on_failure_;
  std::atomic<uint64_t> left_{0};
  std::atomic<uint64_t> settling_ns_{0};

  std::mutex mutex_;  // everything below
  std::condition_variable changed_;
  std::deque<TransferPtr> queue_;
  std::vector<TransferPtr> absent_;  // not arrived yet when it was their turn
  TransferPtr urgent_;
  std::vector<std::thread> threads_;
  size_t unfinished_ = 0;
  size_t helping_ = 0;
  std::exception_ptr failure_;
  bool cancelled_ = false;
};

}  // namespace sing
