// Moves the bytes of storages between the device and the arena, piece by piece, concurrently with
// the main thread: saving for a snapshot, loading after a start. Storages that are mapped from the
// arena (see mapped.h) only have to arrive there.
//
// The main thread continues meanwhile. Before it writes a storage that is being saved, or uses one
// that is being loaded, it settles the transfer: it takes pieces itself, and the helper threads
// take pieces of that storage before any other. When a storage is freed during a save, its transfer
// keeps it alive until it is saved; a rank in a seat waits for that. A device copies on a stream of
// its own, see Note [Copy streams]: the main thread only waits until the copies are in its queue.
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

#include "worker/snapshot/copy_stream.h"
#include "worker/snapshot/readiness.h"
#include "worker/state/arena.h"

namespace sing {

class Transfers;

// Transfer of one storage. It is finished once all its bytes have moved, or are no longer needed.
struct Transfer {
  Transfer(Transfers& owner, c10::Storage storage, Extent extent);

  bool finished() const noexcept { return finished_.load(std::memory_order_acquire); }

  Transfers& owner;
  const Extent extent;
  uint64_t index = 0;  // of its extent in the snapshot that is loaded
  bool soon = false;   // its bytes are about to change
  // When saving: released when the transfer is finished.
  c10::Storage storage;

 private:
  friend class Transfers;
  std::byte* data_;  // of the storage, if the host can address it
  bool mapped_;
  std::atomic<bool> finished_{false};
  // The other members are protected by the owner's mutex.
  uint64_t claimed_ = 0;  // bytes that threads have taken, from the start
  uint64_t moved_ = 0;
  // On a device.
  uint64_t started_ = 0;   // bytes whose copy is in the stream's queue
  EventPtr copied_;        // when all of them are: the event after the last copy
  bool followed_ = false;  // the computing stream waits for it, or it is past
};

using TransferPtr = std::shared_ptr<Transfer>;

class Transfers {
 public:
  enum class Direction : uint8_t { save, load };
  // How much CPU time helper threads take: all; or only what no other thread needs, except for
  // bytes for which the main thread will soon have to wait. Those of a device mostly wait for it.
  enum class Pace : uint8_t { full, gentle };

  Transfers(Direction direction, Arena& arena, c10::Device device, uint64_t piece_bytes);
  ~Transfers();
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  // --- the thread that saves or loads; one at a time ---
  // Adds a transfer. It may be settled from now on; helper threads move it once it is scheduled.
  TransferPtr add(c10::Storage storage, Extent extent);
  // While nothing is executed: what is added is copied as it is now on the device.
  void begin();
  // Schedules everything that was added, in the order in which to move it.
  void schedule(std::vector<TransferPtr> order);
  void help(unsigned threads, Pace pace);
  // Waits until everything has moved. Throws the first failure of any transfer; until reset(), the
  // main thread then waits for none of them.
  void finish();
  // Ends all that is in progress; as after a failure, reset() is to follow.
  void give_up() noexcept;
  void rethrow();
  // Waits until everything that is to be loaded lies in the arena. Throws LoadFailed.
  void await_arrivals();
  // Cancels what is in progress and clears the schedule.
  void reset() noexcept;

  // --- any thread ---
  // Stops all transfers; finish() then throws.
  void cancel() noexcept;
  uint64_t bytes_left() const noexcept { return left_.load(std::memory_order_relaxed); }

  // --- the main thread ---
  // Waits until it has moved, and helps. If it cannot be loaded, throws LoadFailed; if it cannot be
  // saved, returns: only the snapshot fails.
  void settle(const TransferPtr& transfer);
  // The same for what is to be overwritten, as far as it concerns kernels of the computing stream.
  void settle_for_kernels(const TransferPtr& transfer);
  void drop(const TransferPtr& transfer) noexcept;
  // Total time spent in settle().
  uint64_t settling_ns() const noexcept { return settling_ns_.load(std::memory_order_relaxed); }
  // The time that the device has lost since the last call, waiting for transfers.
  uint64_t take_lost_ns();

  // To be called before anything is scheduled.
  void wait_for(Readiness* readiness) { readiness_ = readiness; }
  // Publishes bytes_left() in `word`.
  void publish_left(Word<uint64_t>* word) { published_ = word; }
  // Sets a callback for the first failure. The thread that met it calls this in the middle of its
  // work: it must not block.
  void on_failure(std::function<void()> call) { on_failure_ = std::move(call); }

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Piece {
    TransferPtr transfer;
    uint64_t offset;
    uint64_t count;
  };

  // A piece that is being copied between the device and a buffer.
  struct Flight {
    Piece piece;
    at::Tensor buffer;
    EventPtr copied;
  };

  void work(Pace pace) noexcept;
  void work_on_host(Lock& lock, Pace pace);
  void work_on_device(Lock& lock);
  std::optional<Piece> next(Lock& lock, uint64_t most);
  std::optional<Piece> next_arrived(uint64_t most);
  std::optional<Piece> claim(const TransferPtr& transfer, uint64_t most);
  void look_for_arrivals(Lock& lock);
  bool arrived(const Transfer& transfer) const;
  void move(const Piece& piece);
  void move_unlocked(Lock& lock, const Piece& piece);
  void release_unlocked(Lock& lock, c10::Storage held);
  void await_moved(Lock& lock, const TransferPtr& transfer);
  void note_failed(const Piece& piece) noexcept;
  void forget_flights() noexcept;
  void await_started(Lock& lock, const TransferPtr& transfer, bool finished);
  void start(Lock& lock, const Piece& piece);
  void land(Lock& lock);
  void follow(Transfer& transfer);
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
  std::vector<TransferPtr> absent_;  // had not arrived when their turn came
  TransferPtr urgent_;
  std::vector<std::thread> threads_;
  std::optional<CopyStream> copies_;  // of a device
  std::deque<Flight> flights_;        // in the order of the stream
  LostTime lost_;
  size_t unfinished_ = 0;
  size_t helping_ = 0;
  std::exception_ptr failure_;
  bool cancelled_ = false;
};

}  // namespace sing
