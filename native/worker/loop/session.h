// One session in a worker: its mappings, its state, and the loop that executes its log.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "oplog/mapping.h"
#include "worker/exec/executor.h"
#include "worker/exec/helpers.h"
#include "worker/loop/answers.h"
#include "worker/loop/orders.h"
#include "worker/loop/seat.h"
#include "worker/loop/steps.h"
#include "worker/snapshot/snapshot.h"
#include "worker/state/state.h"

namespace sing {

struct SessionFiles {
  int log = -1;
  int client = -1;
  int worker = -1;
  int agent = -1;
  int arena = -1;
  int snapshot = -1;   // or none
  int readiness = -1;  // or none: all of the snapshot is in the arena
  int contents = -1;   // or none: see Note [Moves] in moved.h
  int carried = -1;    // then: the bytes of storages
  int base = -1;       // then: the snapshot from which a recovery starts, or none
};

struct SessionOptions {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  int threads = 0;  // of a software device; 0: as they are
  uint64_t epoch = 1;
  // Another worker still executes this session: load everything, but execute nothing and do not
  // touch the page until the gate is opened.
  bool prepare = false;
  // Executes it together with others, one at a time; null: its own thread does.
  Seat* seat = nullptr;
  Skipped skip;
  // Below this position of the log, the device executes one record at a time.
  uint64_t careful_until = 0;
  // Makes other workers give back device memory. Called by the main thread while it executes.
  std::function<void()> room;
  Limits limits;
  // What it holds together with other sessions of this process; null: nothing.
  Replicas* replicas = nullptr;
};

// To be called by a thread that is to execute records, with the number of compute threads of a
// software device (0: as they are).
void settle_thread(int threads);

class Session : private Seat::Member {
 public:
  Session(const SessionFiles& files, const SessionOptions& options);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Executes the log until the order to end. Throws CorruptLog. The calling thread is the main
  // thread of orders.h. This and all below throw DeviceLost when the device fails.
  void run();
  Orders& orders() { return orders_; }

  // --- any thread, one at a time ---
  void gate(bool open);
  // See Orders.
  void lease(uint64_t token, bool given) { orders_.lease(token, given); }
  // Takes the lease where the program's memory use is lowest if that point is reached within
  // `within_ns`, otherwise at the end of that time or as soon as the program is idle. Returns when
  // the lease is taken.
  void take_lease(uint64_t token, uint64_t within_ns);
  // Also waits for work that the device still executes for started records.
  void await_parked();
  // Gives back the memory that the device's allocator keeps for the next tensors; the main thread
  // may execute meanwhile. Throws if the device does not work any more.
  // Returns the bytes that could not be given back.
  uint64_t give_back_cache();
  // Opens the gate and returns when everything below `until` was executed.
  void replay(uint64_t until);
  Taken snapshot(Manner manner, const std::function<void()>& frozen = {});
  Departed depart(const KnownContents& known) { return snapshots_.depart(consumed_, known); }
  void trim() { snapshots_.trim(); }
  void preallocate() { snapshots_.preallocate(); }
  // For a prepared session: adopts a newer snapshot.
  void adopt(int snapshot_fd);

  // --- any thread ---
  void hurry() { snapshots_.hurry(); }
  void drop_snapshot() { snapshots_.drop(); }
  void end();
  uint64_t position() const { return consumed_; }
  std::optional<Steps::Found> step(uint64_t since_ns) const { return steps_.find(since_ns); }
  const State& state() const { return state_; }

 private:
  // Does something in which an exception may mean that the device is lost.
  template <class Work>
  auto with_device(Work work);
  void execute_log();
  bool execute_some();
  void take_turns();
  bool carry_out() override;
  bool asks() override;
  bool returns() override;
  bool ready() override { return orders_.pending() || executor_.ready(); }
  void give_up(const ContentId& version) override;
  bool rests() const;
  bool yields();
  bool holds() const;
  bool rests_after_answer() const;
  uint64_t patience() const;
  bool linger();
  void drain(uint64_t end, uint64_t head);
  void execute_records(uint64_t end, uint64_t head);
  bool give_back();
  bool await_turn(bool request);
  void tell_device_time();
  void count_the_last() noexcept;
  void idle();
  bool device_rests() const;
  void sleep();
  void settle();
  bool obey();
  void note_step(bool replayed) noexcept;
  void note_answer() noexcept;
  void tell_progress() noexcept;
  uint64_t checked_head() const;
  void check_position() const;
  void claim();
  void let_go();

  Mapping log_;
  uint64_t capacity_;
  Page<ClientPage> client_;
  Page<WorkerPage> worker_;
  Page<AgentPage> agent_;
  int threads_;
  int spins_;
  Seat* seat_;
  Helpers own_helpers_;
  Helpers& helpers_;
  Orders orders_;
  State state_;
  Snapshots snapshots_;
  Answers answers_;
  MemoryFailures memory_failures_;
  Executor executor_;
  Steps steps_;
  std::atomic<uint64_t> leaving_{0};  // token of the lease to take where `steps_` aims
  uint64_t consumed_ = 0;
  std::atomic<uint64_t> awaited_{UINT64_MAX};  // the position for which replay() waits
  std::promise<void> reached_;
  uint64_t busy_ns_ = 0;
  uint64_t preempted_ns_ = 0;       // when other threads last ran on its core while it spun
  uint64_t requested_ns_ = 0;       // time of the client's last request
  uint64_t dry_since_ns_ = 0;       // in its turn: when the log's end was reached; 0: it is not
  uint64_t answered_ = UINT64_MAX;  // position after the last request
  uint64_t began_with_ = 0;         // unshared memory when its turn began
  uint64_t began_resident_ = 0;     // and all of it
  bool in_turn_ = false;
  bool continues_ = false;           // its next turn is to continue this one
  uint64_t answers_until_ = 0;       // where the records end for which its program waits
  uint64_t looked_ns_ = 0;           // when it looked for other programs that wait
  uint32_t yielded_ = 0;             // how often its turn was interrupted for other programs
  uint64_t napped_at_ = UINT64_MAX;  // position at its last nap
  Exactness::Recovery recovery_;
  uint64_t diverged_before_ = 0;  // by earlier workers
  uint64_t progress_told_ = 0;    // last ClientPage::progress_wanted that was rung for
  const uint64_t epoch_;
  const bool prepare_;
  bool unsettled_ = false;  // freed host memory may be kept, or the device may have failed unread
  bool whole_ = true;       // false: a newer snapshot was adopted in part
  bool claimed_ = false;    // set by the thread that gives the orders
};

}  // namespace sing
