#include "client/log/session.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <c10/util/Exception.h>

#include "client/log/clock.h"
#include "client/log/engagement.h"
#include "client/log/errors.h"
#include "client/log/waiting.h"
#include "oplog/futex.h"

namespace sing::client {

namespace {

constexpr auto kWait = std::chrono::milliseconds(50);  // upper bound on the delay of a missed
                                                       // signal; not a polling interval
// After so many such waits without progress, the worker counts as stuck.
constexpr int kStill = 20;
// Memory of the log is populated in steps of this size: some thousand small operators.
constexpr uint64_t kPopulatedBytes = uint64_t{256} << 10;
constexpr size_t kLargeBytes = size_t{128} << 10;  // from here on, a file is written faster
// Note [Spinning]: a wake-up takes some 50 us, so a waiting thread first spins for about as long.
// If the worker's threads need all cores, spinning delays the very answer for which the thread
// waits, unless the worker executes small operators with one thread. So in that case it spins long
// only while answers come soon.
constexpr int kSpinsMost = 1500;
constexpr int kSpinsLeast = 60;
constexpr uint64_t kSoonNs = 300'000;
constexpr std::string_view kBell = R"({"kind": "Bell"})";

// Position at which the worker slept when it was last woken; see Note [Waking].
std::atomic<uint64_t> woken_at{UINT64_MAX};

void pause_core() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Note [Waking]: a worker that was woken counts as asleep until a core is free for it, which may be
// many records later, and each record would wake it again. A worker sleeps only at the position up
// to which it has consumed the log, while head is not beyond it. The waker advances head before it
// wakes the worker, so the worker cannot sleep at that position again: one wake per position is
// enough.
void wake_worker(const WorkerPage& worker, const ClientPage& client) noexcept {
  const uint64_t at = worker.consumed.load(std::memory_order_seq_cst);
  if (at == client.head.load(std::memory_order_seq_cst)) return;  // it was awake
  if (at == woken_at.load(std::memory_order_acquire)) return;
  futex_wake(low_half(client.head));
  woken_at.store(at, std::memory_order_release);
}

}  // namespace

Session::Session(int log_fd, int client_fd, int worker_fd, int agent_fd, int bell_fd)
    : capacity_(file_bytes(log_fd)),
      log_file_(log_fd),
      log_map_(map_ring(log_fd, capacity_, true)),
      client_(map_page<ClientPage>(client_fd, true)),
      worker_(map_page<const WorkerPage>(worker_fd, false, kAnswerRingBytes)),
      agent_(map_page<const AgentPage>(agent_fd, false)),
      log_(log_map_.data()),
      answers_(worker_.following().data()),
      bell_fd_(bell_fd) {
  head_ = client_->head.load();
  TORCH_CHECK(head_ == 0, "the log of this session belongs to another process");
  settle();
  woken_at.store(UINT64_MAX);
  note_settings();
}

// Sets what depends on the process and its environment, which may change between leave() and
// rejoin().
void Session::settle() {
  client_->pid = static_cast<uint32_t>(getpid());
  clock_ahead_ns_ = monotonic_ahead_ns();
  const long cores = sysconf(_SC_NPROCESSORS_ONLN);
  crowded_ = software() && agent_->threads.load() + 1 > static_cast<uint64_t>(cores);
  spins_.store(crowded_ ? kSpinsLeast : kSpinsMost);
  // Forked children do not use the session, and would keep its memory alive.
  for (const Mapping* mapping :
       {&log_map_, &client_.mapping(), &worker_.mapping(), &agent_.mapping()}) {
    madvise(mapping->data(), mapping->size(), MADV_DONTFORK);
  }
}

void Session::give_up() noexcept {
  agent_gone_.store(true);
  turn();
}

// ---------------------------------------------------------------- appending

void LogFile::open(int fd) noexcept {
  close();
  fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 0);
}

void LogFile::close() noexcept {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

bool LogFile::write(uint64_t position, uint64_t capacity,
                    std::span<const std::byte> bytes) const noexcept {
  while (fd_ >= 0 && !bytes.empty()) {
    const uint64_t offset = position % capacity;
    const size_t count = std::min<size_t>(bytes.size(), capacity - offset);
    const ssize_t done = pwrite(fd_, bytes.data(), count, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(done));
    position += static_cast<uint64_t>(done);
  }
  return bytes.empty();
}

bool Session::has_room(uint64_t bytes) const noexcept {
  return head_ + bytes - agent_->retained.load(std::memory_order_acquire) <= capacity_;
}

// Populates the log's pages as it grows, many at a time: a page fault for each would cost a tenth
// of the time of small operators. On a kernel without MADV_POPULATE_WRITE the pages fault instead.
void Session::populate_locked(uint64_t bytes) noexcept {
  const uint64_t begin = head_ / kPageBytes * kPageBytes;
  const uint64_t end = (head_ + bytes + kPopulatedBytes - 1) / kPopulatedBytes * kPopulatedBytes;
  madvise(log_ + begin % capacity_, end - begin, MADV_POPULATE_WRITE);
  populated_ = end;
}

void Session::write_locked(RecordKind kind, uint8_t flags, std::span<const std::byte> payload,
                           std::span<const std::byte> tail) {
  const size_t used = sizeof(RecordHeader) + payload.size() + tail.size();
  const size_t total = padded(used);
  std::byte* at = log_ + head_ % capacity_;
  const bool large = tail.size() >= kLargeBytes;
  if (head_ + total > populated_) [[unlikely]] {
    large ? void(populated_ = (head_ + total) / kPageBytes * kPageBytes) : populate_locked(total);
  }
  const RecordHeader header{static_cast<uint32_t>(total), static_cast<uint8_t>(kind), flags, 0};
  // Clear the last word for the padding; the payload may then overwrite a part of it.
  constexpr uint64_t zero = 0;
  std::memcpy(at + total - sizeof(zero), &zero, sizeof(zero));
  std::memcpy(at, &header, sizeof(header));
  if (!payload.empty()) std::memcpy(at + sizeof(header), payload.data(), payload.size());
  const size_t before = sizeof(header) + payload.size();
  if (!tail.empty() && !(large && log_file_.write(head_ + before, capacity_, tail))) {
    std::memcpy(at + before, tail.data(), tail.size());
  }
  head_ += total;
  ++counters_.records;
  counters_.operators += kind == RecordKind::call;
  counters_.bytes += total;
}

// Returns the bytes of the records that must precede the next record.
uint64_t Session::unwritten_locked() const noexcept {
  uint64_t bytes = 0;
  if (answered_.size() != 0) bytes += padded(sizeof(RecordHeader) + answered_.size());
  if (!settings_told_) bytes += padded(sizeof(RecordHeader) + 4 + sizeof(Settings));
  if (!pending_.empty()) {
    bytes += padded(sizeof(RecordHeader) + 8 + pending_.size() * sizeof(StorageEntry));
  }
  return bytes;
}

void Session::flush_locked() {
  if (answered_.size() != 0) [[unlikely]] {
    write_locked(RecordKind::answered, 0, answered_.view(), {});
    answered_.clear();
    publish_locked();
    client_->answer_wanted.store(0, std::memory_order_seq_cst);
  }
  if (!settings_told_) {
    Writer out;
    put_settings(out, settings_[settings_number()]);
    write_locked(RecordKind::settings, 0, out.view(), {});
    settings_told_ = true;
  }
  if (pending_.empty()) return;
  const uint32_t prefix[2] = {static_cast<uint32_t>(pending_.size()), 0};
  write_locked(RecordKind::storages, 0, std::as_bytes(std::span(prefix)),
               std::as_bytes(std::span(pending_)));
  for (const StorageEntry& entry : pending_) {
    if (entry.action == static_cast<uint32_t>(StorageAction::free)) free_ids_.push_back(entry.id);
  }
  pending_.clear();
  pending_bytes_ = 0;
}

void Session::publish_locked() {
  client_->operators.store(counters_.operators, std::memory_order_relaxed);
  client_->head.store(head_, std::memory_order_seq_cst);
}

// To be called after head was published. The worker and the agent set their words before they check
// head again, so one of the two sides always sees the other's change.
void Session::notify(bool requested) {
  switch (static_cast<Presence>(agent_->presence.load(std::memory_order_seq_cst))) {
    case Presence::present:
      if (const auto rest = static_cast<Rest>(worker_->asleep.load(std::memory_order_seq_cst));
          rest == Rest::asleep || (rest == Rest::napping && requested)) {
        wake_worker(*worker_, *client_);
      }
      if (head_ - agent_->retained.load(std::memory_order_relaxed) >
          agent_->log_budget.load(std::memory_order_relaxed)) {
        ring_if_needed();
      }
      return;
    case Presence::absent:
      ring_if_needed();
      return;
    case Presence::ended:
      return;
  }
}

void Session::ring() noexcept {
  std::lock_guard lock(bell_mutex_);
  if (bell_fd_ < 0) return;  // rejoin() rings
  char frame[4 + kBell.size()];
  const uint32_t count = static_cast<uint32_t>(kBell.size());
  std::memcpy(frame, &count, sizeof(count));
  std::memcpy(frame + sizeof(count), kBell.data(), kBell.size());
  ssize_t sent = 0;
  do {
    sent = send(bell_fd_, frame, sizeof(frame), MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  // A full buffer means that bells are waiting to be read: another one would add nothing. If the
  // connection has ended, the code that makes the next one rings there
  // (kernel/activation/agent_connection.py).
}

// Rings once for each state of the agent's page: its bell word changes whenever the agent has
// acted.
void Session::ring_if_needed() noexcept {
  const uint32_t seen = agent_->bell.load(std::memory_order_seq_cst);
  {
    std::lock_guard lock(mutex_);
    if (rung_once_ && rung_ == seen) return;
    rung_once_ = true;
    rung_ = seen;
  }
  ring();
}

void Session::check_usable() const {
  if (agent_->presence.load(std::memory_order_acquire) == static_cast<uint32_t>(Presence::ended)) {
    char reason[sizeof(agent_->reason) + 1] = {};
    std::memcpy(reason, agent_->reason, sizeof(agent_->reason));
    TORCH_CHECK(false, "CUDA error: the device session has ended. ", reason);
  }
  TORCH_CHECK(!agent_gone_.load(),
              "CUDA error: the device daemon of jupyter_sing is gone, and with it this kernel's "
              "device session. Restart the kernel to get a new one.");
}

uint64_t Session::append_record(RecordKind kind, uint8_t flags, std::span<const std::byte> payload,
                                std::span<const std::byte> tail) {
  const uint64_t total = padded(sizeof(RecordHeader) + payload.size() + tail.size());
  TORCH_CHECK(total <= kRecordBytesMax, "operator with too many operands for one log record");
  if (capturing() && keep(kind, flags, payload, tail)) [[unlikely]]
    return head_;
  uint64_t end = 0;
  for (;;) {
    check_usable();
    uint64_t needed = total, awaited = 0;
    {
      const auto lock = lock_present();
      needed += unwritten_locked();
      if (pace_.due(counters_.records)) [[unlikely]]
        awaited = pace_.mark(counters_.records, head_, worker_->consumed.load(), monotonic_ns(0));
      if (awaited == 0 && has_room(needed)) {
        flush_locked();
        if (flags & kRequest) {
          client_->answer_taken.store(0, std::memory_order_relaxed);
          client_->answer_wanted.store(head_ + total, std::memory_order_release);
          ++counters_.requests;
          ++engaged_;  // the caller makes an Engagement for it
        }
        write_locked(kind, flags, payload, tail);
        publish_locked();
        end = head_;
        break;
      }
      if (awaited != 0) client_->progress_wanted.store(awaited, std::memory_order_seq_cst);
    }
    if (awaited != 0) {
      await_progress(awaited);
      continue;
    }
    ring_if_needed();
    wait_agent([&] {
      std::lock_guard lock(mutex_);
      return has_room(needed);
    });
  }
  notify((flags & kRequest) != 0);
  return end;
}

void Session::append(RecordKind kind, std::span<const std::byte> payload,
                     std::span<const std::byte> tail, uint8_t flags) {
  append_record(kind, flags, payload, tail);
}

void Session::flush_storages() {
  {
    std::lock_guard lock(mutex_);
    if ((pending_.empty() && answered_.size() == 0) || place_ != Place::present) return;
    if (!has_room(unwritten_locked())) return;  // the next record flushes them
    flush_locked();
    publish_locked();
  }
  notify(false);
}

// ---------------------------------------------------------------- waiting

void Session::wait_answer(const std::function<bool()>& ready) {
  for (int left = spins_.load(std::memory_order_relaxed); left > 0; --left) {
    if (ready()) return;
    pause_core();
  }
  const uint64_t began = crowded_ ? monotonic_ns(0) : 0;
  Waiting waiting;
  client_->sleepers.fetch_add(1, std::memory_order_seq_cst);
  struct Awake {
    Word<uint32_t>& sleepers;
    ~Awake() { sleepers.fetch_sub(1, std::memory_order_relaxed); }
  } awake{client_->sleepers};
  for (;;) {
    const uint32_t bell = worker_->bell.load(std::memory_order_seq_cst);
    if (ready()) {
      if (crowded_) {  // see Note [Spinning]
        const bool soon = monotonic_ns(0) - began < kSoonNs;
        spins_.store(soon ? kSpinsMost : kSpinsLeast, std::memory_order_relaxed);
      }
      return;
    }
    check_usable();
    const bool woken = futex_wait(&worker_->bell, bell, kWait) == Woken::woken;
    waiting.check_signals(!woken);
  }
}

// A signal ends the wait, but raises nothing: as with CUDA, the function that the interpreter has
// called, such as a whole backward(), is completed before the interpreter checks signals. Only if
// the worker is stuck is it interrupted, like any other wait. Several threads may wait for several
// positions: the bell is rung for one of them, and the others check again after a timeout. The
// process may detach from its session meanwhile.
void Session::await_progress(uint64_t position) {
  Waiting waiting;
  uint64_t consumed = worker_->consumed.load(std::memory_order_acquire);
  int still = 0;
  for (;;) {
    const uint32_t bell = worker_->bell.load(std::memory_order_seq_cst);
    const uint64_t now = worker_->consumed.load(std::memory_order_acquire);
    if (now >= position) break;
    check_usable();
    if (now != consumed) still = 0;
    consumed = now;
    const Woken woken = futex_wait(&worker_->bell, bell, kWait);
    if (woken == Woken::interrupted) break;
    if (woken == Woken::timed_out && ++still > kStill) waiting.check_signals(true);
  }
}

// A thread that waits here has rung the bell. Ringing again would make the agent change its own
// bell word, and so on in a loop; the agent checks by itself when its options have changed.
void Session::wait_agent(const std::function<bool()>& ready) {
  Waiting waiting;
  for (;;) {
    const uint32_t bell = agent_->bell.load(std::memory_order_seq_cst);
    if (ready()) return;
    check_usable();
    const bool woken = futex_wait(&agent_->bell, bell, kWait) == Woken::woken;
    waiting.check_signals(!woken);
  }
}

// ---------------------------------------------------------------- requests

// Takes what is produced, until the answer is complete. Returns false if a worker has begun it
// again, see Note [Restarted answers] in worker/loop/answers.h.
bool Session::take(std::span<std::byte> into, uint64_t generation) {
  uint64_t taken = 0;
  const auto current = [&] {
    std::atomic_thread_fence(std::memory_order_acquire);
    return worker_->answer_generation.load(std::memory_order_acquire) == generation;
  };
  while (taken < into.size()) {
    uint64_t produced = 0;
    wait_answer([&] {
      produced = worker_->answer_produced.load(std::memory_order_acquire);
      return produced > taken || !current();
    });
    produced = std::min<uint64_t>(produced, into.size());
    while (taken < produced) {
      const uint64_t at = taken % kAnswerRingBytes;
      const uint64_t count = std::min(produced - taken, kAnswerRingBytes - at);
      std::memcpy(into.data() + taken, answers_ + at, count);
      taken += count;
    }
    if (!current()) return false;
    client_->answer_taken.store(taken, std::memory_order_seq_cst);
    if (worker_->asleep.load(std::memory_order_seq_cst) != 0) {
      futex_wake(low_half(client_->answer_taken));
    }
  }
  return true;
}

void Session::answer(uint64_t position, const std::function<std::byte*(uint64_t)>& reserve) {
  const auto given = [&] {
    return worker_->answer_position.load(std::memory_order_acquire) == position;
  };
  for (;;) {
    wait_answer(given);
    const uint64_t generation = worker_->answer_generation.load(std::memory_order_acquire);
    if (!given()) continue;
    const auto status =
        static_cast<AnswerStatus>(worker_->answer_status.load(std::memory_order_relaxed));
    const uint64_t total = worker_->answer_bytes.load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (worker_->answer_generation.load(std::memory_order_acquire) != generation) continue;
    if (client_->answer_generation.load(std::memory_order_relaxed) != generation) {
      client_->answer_taken.store(0, std::memory_order_seq_cst);
      client_->answer_generation.store(generation, std::memory_order_seq_cst);
    }
    std::vector<std::byte> failure;
    if (status == AnswerStatus::error) failure.resize(total);
    std::byte* to = status == AnswerStatus::error ? failure.data() : reserve(total);
    if (!take({to, total}, generation)) continue;
    if (status == AnswerStatus::error) raise_answer(failure);
    return;
  }
}

// Notes an answer that the next record is to precede.
void Session::note_answered_locked(uint64_t position, AnswerStatus status,
                                   std::span<const std::byte> bytes) {
  answered_.clear();
  answered_.put<uint64_t>(position);
  answered_.put<uint32_t>(static_cast<uint32_t>(status));
  answered_.put<uint32_t>(static_cast<uint32_t>(bytes.size()));
  answered_.put_bytes(bytes.data(), bytes.size());
}

// Writes that a request failed or was abandoned, if the log has room now.
void Session::note_failed(uint64_t position) noexcept {
  {
    std::lock_guard lock(mutex_);
    note_answered_locked(position, AnswerStatus::error, {});
    if (!has_room(unwritten_locked())) return;
    flush_locked();
    publish_locked();
  }
  notify(false);
}

// Withdraws the awaited answer when a request ends, unless its answer is to be recorded. If it ends
// by an exception, the worker must not wait for a client that no longer waits. The worker may sleep
// on answer_taken, so that word changes, too.
class Session::Wanted {
 public:
  Wanted(Session& session, uint64_t position) : session_(session), position_(position) {}
  ~Wanted() {
    ClientPage& page = *session_.client_;
    if (!taken_) session_.note_failed(position_);
    if (!recorded_) page.answer_wanted.store(0, std::memory_order_seq_cst);
    if (taken_) return;
    page.answer_taken.store(UINT64_MAX, std::memory_order_seq_cst);
    futex_wake(low_half(page.answer_taken));
  }
  Wanted(const Wanted&) = delete;
  Wanted& operator=(const Wanted&) = delete;

  void taken() { taken_ = true; }
  void record(std::span<const std::byte> bytes) {
    std::lock_guard lock(session_.mutex_);
    session_.note_answered_locked(position_, AnswerStatus::ok, bytes);
    recorded_ = true;
  }

 private:
  Session& session_;
  const uint64_t position_;
  bool taken_ = false;
  bool recorded_ = false;
};

void Session::request(RecordKind kind, std::span<const std::byte> payload,
                      std::span<std::byte> destination, uint8_t flags) {
  const auto lock = lock_without_gil(request_mutex_);
  const uint64_t position = append_record(kind, kRequest | flags, payload, {});
  const Engagement engagement(*this);
  Wanted wanted(*this, position);
  answer(position, [&](uint64_t total) {
    TORCH_CHECK(total == destination.size(), "the device worker answered ", total, " bytes where ",
                destination.size(), " were asked for");
    return destination.data();
  });
  wanted.taken();
}

std::vector<std::byte> Session::request(RecordKind kind, std::span<const std::byte> payload,
                                        uint8_t flags, bool recorded) {
  const auto lock = lock_without_gil(request_mutex_);
  const uint64_t position = append_record(kind, kRequest | flags, payload, {});
  const Engagement engagement(*this);
  Wanted wanted(*this, position);
  std::vector<std::byte> bytes;
  answer(position, [&](uint64_t total) {
    bytes.resize(total);
    return bytes.data();
  });
  if (recorded) wanted.record(bytes);
  wanted.taken();
  return bytes;
}

void Session::synchronize() { request(RecordKind::synchronize, {}, {}); }

bool Session::reached(uint64_t position) const noexcept {
  return worker_->consumed.load(std::memory_order_acquire) >= position;
}

void Session::note_settings() {
  Settings now{};
  if (!settings_.empty()) now = settings_[settings_number()];
  read_settings(now);
  std::lock_guard lock(mutex_);
  const auto known = std::find(settings_.begin(), settings_.end(), now);
  const auto number = static_cast<uint32_t>(known - settings_.begin());
  if (known == settings_.end()) {
    settings_.push_back(now);
  } else if (number == settings_number()) {
    return;
  }
  settings_number_.store(number, std::memory_order_relaxed);
  settings_told_ = false;
}

// ---------------------------------------------------------------- peers

void Session::await_peers(uint32_t waiting) {
  client_->awaiting_peers.store(waiting, std::memory_order_seq_cst);
  if (waiting == 0) return;
  // A worker that hopes for further records gives its turn to another rank now.
  if (worker_->asleep.load(std::memory_order_seq_cst) != 0) futex_wake(low_half(client_->head));
}

// ---------------------------------------------------------------- cells

void Session::cell(int running) {
  {
    std::lock_guard lock(mutex_);
    const int now = static_cast<int>(client_->cells_running.load()) + running;
    client_->cells_running.store(static_cast<uint32_t>(std::max(now, 0)));
    client_->cell_changed_ns.store(monotonic_ns(clock_ahead_ns_));
    if (running < 0) client_->cells_ended.fetch_add(1);
  }
  if (running >= 0) return;
  flush_storages();
  // The agent is notified at once that this session can be suspended, for waiters on memory.
  if (client_->cells_running.load() == 0) ring();
}

}  // namespace sing::client
