// Takes snapshots and starts from them, while the main thread continues to execute.
//
// Note [Extents]. A storage that was saved keeps its extent until its bytes change, and the next
// snapshot refers to it again: only what has changed is copied. What a snapshot refers to is not
// overwritten as long as a worker may start from it: AgentPage::retained names the newest snapshot
// that the agent has, and the ones before it are then given up. So a worker may be killed at any
// moment, and two of them may have the arena open: one that executes, and one that prepares to.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "oplog/mapping.h"
#include "worker/loop/orders.h"
#include "worker/snapshot/tables.h"
#include "worker/snapshot/transfers.h"

namespace sing {

// A snapshot as the agent receives it.
struct Taken {
  int fd = -1;  // of the tables
  uint64_t position = 0;
  uint64_t bytes = 0;   // of the state in the snapshot
  uint64_t copied = 0;  // changed since the snapshot before
  // For which the main thread did not execute; beside the execution on a GPU: which the GPU lost.
  uint64_t stalled_ns = 0;
  uint64_t duration_ns = 0;
};

// What a session takes along to another process, see Note [Moves].
struct Departed {
  File tables{-1}, contents{-1}, carried{-1};
  uint64_t copied = 0;   // bytes in `carried`
  uint64_t omitted = 0;  // storages whose bytes the target has
};

// Makes a file for bytes that are carried along.
File carried_file();

// How a snapshot is taken: with the main thread parked until it is done, at full speed;
// concurrently; or concurrently, beginning when it disturbs least (see rhythm.h).
enum class Manner : uint8_t { stop = 0, beside = 1, patient = 2 };

class Snapshots {
 public:
  Snapshots(State& state, int arena_fd, const AgentPage& agent, Orders& orders, uint64_t epoch);

  // --- while nothing is executed ---
  // Fills the state and returns its position. Storages are loaded during the call and after it, by
  // threads and by the main thread when it needs one. `readiness_fd`: descriptor that shows what
  // has arrived, or -1.
  uint64_t open(int tables_fd, int readiness_fd);
  // The same for what comes from another process of the job. `base_fd`: tables of the snapshot from
  // which a recovery starts, or -1.
  uint64_t open_moved(int tables_fd, int contents_fd, int carried_fd, int base_fd);
  // True if it came from another process: a recovery starts from an older snapshot.
  bool moved() const noexcept { return moved_; }
  // Like open(), for a newer snapshot: what has not changed since stays.
  uint64_t adopt(int tables_fd);
  // Waits until everything is loaded, and finds what others have, too. Throws LoadFailed.
  void finish_loading() {
    loads_.finish();
    if (moved_) state_.storages.enter_contents();
    state_.storages.find_contents();
  }

  // --- any thread, one at a time ---
  // `frozen`: called when the snapshot's contents can no longer change, before they are copied.
  Taken take(Manner manner, const uint64_t& position, WorkerPage& page,
             const std::function<void()>& frozen);
  // For a move to a process that has the `known` contents. Nothing is executed meanwhile, and
  // nothing changes here. Only on a software device.
  Departed depart(const uint64_t& position, const KnownContents& known);
  // Frees the memory that no snapshot needs.
  void trim();
  // Takes the memory that the next snapshot needs, or for a job the next move: so one which must be
  // fast finds it there. Ends early at hurry().
  void preallocate();

  // --- any thread ---
  void hurry();
  // Ends a patient snapshot: take() then throws. Hurries another one.
  void drop();
  // Ends a save or load in progress; take() then throws.
  void abort() noexcept;
  Transfers& loads() { return loads_; }

 private:
  struct Kept {
    uint64_t position;
    std::vector<Extent> extents;

    static Kept of(const Snapshot& snapshot);
  };
  struct Making;

  unsigned threads() const;
  void await_moment(const WorkerPage& page);
  uint64_t fill(const Snapshot& snapshot, std::vector<Slot> old, MovedContents* moved);
  void give_up_older();
  FreeRanges free_ranges() const;
  void give_back(const FreeRanges& free);
  void forget_preallocated() noexcept;
  std::vector<uint64_t> unsaved(bool (*wanted)(const Slot&));
  void take_memory(Arena& file, FreeRanges free, const std::vector<uint64_t>& sizes, uint64_t most);
  void freeze(Making& making);
  void save(Making& making, uint32_t id, Slot& slot, Extent extent);
  void undo(const Making& making) noexcept;

  State& state_;
  Arena arena_;
  const AgentPage& agent_;
  Orders& orders_;
  uint64_t version_;  // of the newest extent
  std::unique_ptr<Readiness> readiness_;
  std::vector<Kept> kept_;
  bool moved_ = false;
  // Until then, memory that is free in the arena is for a snapshot that is expected, and that of
  // this file for a move.
  uint64_t preallocated_until_ns_ = 0;
  std::optional<File> preallocated_;
  // Sizes of the storages that the last snapshot copied and that change again and again.
  std::vector<uint64_t> changing_;
  std::atomic<bool> hurried_{false};
  std::atomic<bool> patient_{false};  // a patient snapshot is being taken
  std::atomic<bool> dropped_{false};
  Transfers loads_;
  Transfers saves_;
};

}  // namespace sing
