// Client end of a device session: appends records, waits for answers and for memory.
//
// Threads. Python's threads and autograd's append directly; `mutex_` orders them. One request is
// outstanding at a time (`request_mutex_`).
//
// Note [GIL]: a thread may hold the GIL when it calls the session. While it holds the GIL, it never
// waits for another process and never blocks on request_mutex_; and no thread takes the GIL while
// holding mutex_. Otherwise an interrupt could not be delivered, or two threads would wait for each
// other.
//
// Note [Detaching]: so that the process can be saved, it can be without the session's memory for a
// while. From leave() to rejoin(), private copies of the pages are mapped at their addresses: code
// that reads there without a lock (check_usable, reached, the futexes) finds their last contents. A
// thread that wants to write to the log, or to wait for another process, calls lock_present(), and
// waits there without the GIL. Operations that must not be interrupted halfway are counted
// (`engaged_`): a request until its answer was taken, a request for memory until it was answered;
// leave() waits for these. The rest, such as freeing a storage, continues, and its effects are kept
// until rejoin(), as are the contents of the client page.
//
// Note [Recorded answers]: a worker that executes the log again may compute other values, and
// geometry may depend on them (nonzero). But the log names tensors of the geometry that was
// answered. So such an answer is itself a record, written before the next record; so is the fact
// that a request failed or was abandoned. Until that record is in the log, `answer_wanted` keeps
// its position: then the answer ring has what the client received.
//
// Note [Opening]: a process that joins no session at `import torch` opens one of its own when it
// first uses the device, and so does a process that was forked from one with a session. Until then
// it has none, and everything that only describes a device, or frees what another process had,
// works without one. A forked child keeps what is known of operators, shapes and settings; their
// numbers are the first records of the new session. It keeps the objects of its parent,
// too, such as tensors, but not what they stand for: each has the generation of the process that
// made it, and is refused in a later one.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "client/log/addresses.h"
#include "client/log/pace.h"
#include "oplog/codec.h"
#include "oplog/mapping.h"
#include "oplog/settings.h"

namespace sing::client {

class Capture;

// Number of forks between the first process with this library and this one; see Note [Opening].
inline uint32_t generation = 0;

// A storage as the client knows it; the context of a DataPtr points to one.
struct Slot {
  uint32_t id;
  uint64_t bytes;          // as torch requested
  uint64_t charged;        // as accounted: see charged_bytes
  std::byte* address;      // never dereferenced
  uint32_t address_class;  // size class of the address, for its reuse
  uint32_t made_in = generation;
  // Note [Captures] in capture.h: number of captures that name it, the capture that made it, and
  // whether only captures still need it.
  uint32_t pins = 0;
  const Capture* maker = nullptr;
  bool freed = false;
};

struct Counters {
  uint64_t operators = 0, records = 0, bytes = 0, requests = 0;
  uint64_t allocations = 0, frees = 0, live_peak = 0;
  uint64_t bytes_allocated = 0, bytes_freed = 0;  // as charged
  uint64_t out_of_memory = 0;
};

// The file of the log, to write what is large: new pages of a mapping are cleared first, which
// takes as long as the copy. Closed while the process has no session, and in forked children.
class LogFile {
 public:
  explicit LogFile(int fd) noexcept { open(fd); }
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;
  ~LogFile() { close(); }

  // The caller keeps ownership of `fd`.
  void open(int fd) noexcept;
  void close() noexcept;
  // Writes from a position of the log of this capacity. False: not, or not all.
  bool write(uint64_t position, uint64_t capacity, std::span<const std::byte> bytes) const noexcept;

 private:
  int fd_ = -1;
};

class Session {
 public:
  // The session of this process, which may be opened for that; see Note [Opening].
  static Session& get() {
    Session* session = session_.load(std::memory_order_acquire);
    if (session == nullptr) [[unlikely]]
      session = &open();
    return *session;
  }
  static bool connected() noexcept { return session_.load(std::memory_order_acquire) != nullptr; }
  // Sets the function that opens a session, which calls connect(); it has the GIL.
  static void on_first_use(std::function<void()> opener);
  // True in a process that joins a session at its first use of the device.
  static bool opened_here() noexcept;
  // True in a process forked from a connected one that cannot open a session.
  static bool forked() noexcept;
  static void connect(int log_fd, int client_fd, int worker_fd, int agent_fd, int bell_fd);

  // Appends one record whose payload is `payload` followed by `tail`. Pending allocations and frees
  // are written before it. Blocks while the log is full, and also while the worker is far behind
  // (Note [Pace] in pace.h).
  void append(RecordKind kind, std::span<const std::byte> payload,
              std::span<const std::byte> tail = {}, uint8_t flags = 0);

  // Appends a request and waits for its answer: the bytes go to `destination`, which must have
  // their exact size. Raises the error that the worker reports, or KeyboardInterrupt.
  void request(RecordKind kind, std::span<const std::byte> payload,
               std::span<std::byte> destination, uint8_t flags = 0);
  // The same for an answer of unknown size. `recorded`: it depends on data, so the log keeps it,
  // see Note [Recorded answers].
  std::vector<std::byte> request(RecordKind kind, std::span<const std::byte> payload,
                                 uint8_t flags = 0, bool recorded = false);

  // Waits until everything appended so far was executed; raises a pending error.
  void synchronize();

  // Allocates a storage. `announced`: the worker learns of it with the next record; otherwise the
  // record that the caller is about to append binds the number. Throws OutOfMemoryError.
  Slot* allocate(uint64_t bytes, bool announced);
  void free(Slot* slot) noexcept;
  // Gives a slot the size that the worker reported, and an address.
  void charge(Slot* slot, uint64_t bytes);
  // Grows or shrinks a storage; the slot gets a new address. Appends the resize.
  void resize(Slot* slot, uint64_t bytes);
  // Requests a grant for `more` bytes beyond what is in use now.
  bool try_reserve(uint64_t more);
  // Requests a grant for the memory in use, if it exceeds the current one; called after `charge`.
  // Throws OutOfMemoryError.
  void cover_use();
  void flush_storages();

  // Limits the session to `bytes` from now on, whatever the agent grants.
  void limit_memory(uint64_t bytes);

  // --- Note [Captures] in capture.h
  static bool capturing() noexcept {
    return capture_.load(std::memory_order_relaxed) != nullptr && probing_ == 0;
  }
  Capture* begin_capture();
  void end_capture(Capture& capture);
  // Notes that a call which is about to be captured names this storage.
  void pin(Slot* slot);
  void replay(const Capture& capture);
  void discard(Capture* capture) noexcept;

  // Assigns a number to an operator; `origin` is what put_origin() wrote for one that is not
  // torch's.
  uint32_t define(const std::string& name, const std::string& overload,
                  std::span<const std::byte> origin);

  // Notes that torch's settings may have changed. The caller holds the GIL. If they have, a record
  // with the new settings precedes the next record.
  void note_settings();
  // A number for torch's current settings; equal settings have the same number.
  static uint32_t settings_number() noexcept {
    return settings_number_.load(std::memory_order_relaxed);
  }

  void cell(int running);
  // How the program waits for other ranks of its job: see ClientPage::awaiting_peers.
  void await_peers(uint32_t waiting);
  // Marks the daemon as permanently gone: all current and later waits for the device raise an
  // error.
  void give_up() noexcept;

  // Detaches the process from the session: unmaps the session's memory and forgets the bell's
  // descriptor, which the caller owns again. Throws if a thread waits for another process for
  // longer than `limit`, or if the wait is interrupted; then nothing has changed. See
  // Note [Detaching].
  void leave(std::chrono::milliseconds limit);
  // Reattaches, perhaps to another session with the same state as this one; perhaps in a process
  // that was restored from images. Throws if the state differs from the one at leave(); then the
  // process stays detached.
  void rejoin(int log_fd, int client_fd, int worker_fd, int agent_fd, int bell_fd);

  bool reached(uint64_t position) const noexcept;
  uint64_t head() const noexcept { return head_; }

  const ClientPage& client() const { return *client_; }
  const AgentPage& agent() const { return *agent_; }
  // True if the device computes on the CPU, with the CPU's own kernels.
  bool software() const noexcept {
    return agent_->device_kind == static_cast<uint32_t>(DeviceKind::software);
  }
  Counters& counters() { return counters_; }
  void reset_peak();

 private:
  class Wanted;
  friend class Probing;
  static Session& open();
  static void begin_child() noexcept;
  void tell_definitions();
  Session(int log_fd, int client_fd, int worker_fd, int agent_fd, int bell_fd);

  enum class Place : uint8_t { present, leaving, away };
  class Engagement;

  std::unique_lock<std::mutex> lock_present();
  void wait_present();
  void disengage() noexcept;
  void turn() noexcept;
  void wait_disengaged(std::chrono::milliseconds limit);
  void vacate_locked();
  void settle();
  uint64_t append_record(RecordKind kind, uint8_t flags, std::span<const std::byte> payload,
                         std::span<const std::byte> tail);
  bool has_room(uint64_t bytes) const noexcept;
  void populate_locked(uint64_t bytes) noexcept;
  void write_locked(RecordKind kind, uint8_t flags, std::span<const std::byte> payload,
                    std::span<const std::byte> tail);
  void flush_locked();
  uint64_t unwritten_locked() const noexcept;
  void publish_locked();
  void resize_locked(Slot* slot, uint64_t bytes);
  void notify(bool requested);
  void ring() noexcept;
  void ring_if_needed() noexcept;
  void check_usable() const;
  void answer(uint64_t position, const std::function<std::byte*(uint64_t)>& reserve);
  bool take(std::span<std::byte> into, uint64_t generation);
  void note_answered_locked(uint64_t position, AnswerStatus status,
                            std::span<const std::byte> bytes);
  void note_failed(uint64_t position) noexcept;
  void wait_answer(const std::function<bool()>& ready);
  void wait_agent(const std::function<bool()>& ready);
  void await_progress(uint64_t position);
  bool keep(RecordKind kind, uint8_t flags, std::span<const std::byte> payload,
            std::span<const std::byte> tail);
  void pin_locked(Capture& capture, Slot* slot);
  Slot* take_idle_locked(uint64_t bytes);
  bool outlive_locked(Slot* slot);
  [[noreturn]] void refuse_memory(uint64_t bytes, uint64_t used);
  std::unique_ptr<Slot> take_slot_locked();
  bool take_memory_locked(uint64_t wanted) noexcept;
  bool want(uint64_t bytes);

  const uint64_t capacity_;
  LogFile log_file_;
  const Mapping log_map_;
  const Page<ClientPage> client_;
  const Page<const WorkerPage> worker_;
  const Page<const AgentPage> agent_;
  std::byte* const log_;
  const std::byte* const answers_;
  bool crowded_ = false;        // the worker's threads need all cores
  std::atomic<int> spins_{0};   // see Note [Spinning]
  int64_t clock_ahead_ns_ = 0;  // offset to the CLOCK_MONOTONIC of the other processes
  std::atomic<bool> agent_gone_{false};
  Word<uint32_t> turn_{0};  // futex word: changed when lock_present() or leave() may continue

  std::mutex bell_mutex_;
  int bell_fd_;  // negative: none

  std::mutex mutex_;  // everything below
  Place place_ = Place::present;
  uint32_t engaged_ = 0;
  uint64_t head_ = 0;
  uint64_t populated_ = 0;  // a position up to which the log has pages
  uint64_t used_ = 0, peak_ = 0, most_ = UINT64_MAX;
  Writer answered_;  // the next record, unless empty
  std::vector<StorageEntry> pending_;
  uint64_t pending_bytes_ = 0;
  std::vector<uint32_t> free_ids_;
  std::vector<std::unique_ptr<Slot>> spare_slots_;
  uint32_t next_id_ = 1;
  uint32_t rung_ = 0;
  bool rung_once_ = false;
  Counters counters_;
  Pace pace_;
  Addresses addresses_;
  bool settings_told_ = false;
  static inline std::vector<Settings> settings_;  // all settings of torch so far, by their numbers
  static inline std::atomic<uint32_t> settings_number_{0};
  static inline std::atomic<Capture*> capture_{nullptr};  // the capture in progress
  static inline thread_local uint32_t probing_ = 0;
  static inline std::atomic<Session*> session_{nullptr};

  std::mutex request_mutex_;
  std::mutex want_mutex_;
};

}  // namespace sing::client
