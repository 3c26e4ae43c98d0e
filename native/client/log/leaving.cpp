// Detaching from the session's memory and reattaching: Note [Detaching] in session.h.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

#include <c10/util/Exception.h>

#include "client/log/clock.h"
#include "client/log/session.h"
#include "client/log/waiting.h"
#include "oplog/futex.h"

namespace sing::client {

namespace {

constexpr auto kWait = std::chrono::milliseconds(50);  // upper bound on the delay of a missed
                                                       // signal; not a polling interval

// Copies the first page of a mapping into private memory of the mapping's size.
Mapping private_copy(const Mapping& of, bool writable) {
  Mapping copy = map_private(of.size());
  std::memcpy(copy.data(), of.data(), kPageBytes);
  if (!writable && mprotect(copy.data(), copy.size(), PROT_READ) != 0) {
    throw_errno("cannot protect memory");
  }
  return copy;
}

// Copies all fields that the client writes, word by word: the agent may read them meanwhile.
void copy_words(const ClientPage& from, ClientPage& to) noexcept {
  const auto* source = reinterpret_cast<const std::byte*>(&from);
  auto* target = reinterpret_cast<std::byte*>(&to);
  for (size_t at = offsetof(ClientPage, head); at < kPageBytes; at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, source + at, sizeof(word));
    std::atomic_ref(*reinterpret_cast<uint64_t*>(target + at)).store(word);
  }
}

}  // namespace

// ---------------------------------------------------------------- threads that use the device

std::unique_lock<std::mutex> Session::lock_present() {
  for (;;) {
    std::unique_lock lock(mutex_);
    if (place_ == Place::present) [[likely]]
      return lock;
    lock.unlock();
    wait_present();
  }
}

void Session::wait_present() {
  Waiting waiting;
  for (;;) {
    const uint32_t seen = turn_.load(std::memory_order_seq_cst);
    {
      std::lock_guard lock(mutex_);
      if (place_ == Place::present) return;
    }
    check_usable();
    const bool woken = futex_wait(&turn_, seen, kWait) == Woken::woken;
    waiting.check_signals(!woken);
  }
}

void Session::turn() noexcept {
  turn_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(&turn_);
}

void Session::disengage() noexcept {
  bool awaited = false;
  {
    std::lock_guard lock(mutex_);
    awaited = --engaged_ == 0 && place_ == Place::leaving;
  }
  if (awaited) turn();
}

// ---------------------------------------------------------------- the thread that detaches

// Waits for engaged threads. No new ones can appear while place_ is `leaving`.
void Session::wait_disengaged(std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  Waiting waiting;
  for (;;) {
    const uint32_t seen = turn_.load(std::memory_order_seq_cst);
    {
      std::lock_guard lock(mutex_);
      if (engaged_ == 0) return;
    }
    check_usable();
    TORCH_CHECK(std::chrono::steady_clock::now() < deadline,
                "a thread of the notebook waits for the device");
    const bool woken = futex_wait(&turn_, seen, kWait) == Woken::woken;
    waiting.check_signals(!woken);
  }
}

void Session::leave(std::chrono::milliseconds limit) {
  {
    std::lock_guard lock(mutex_);
    TORCH_CHECK(place_ == Place::present, "the process has left its device session already");
    check_usable();
    place_ = Place::leaving;
  }
  try {
    wait_disengaged(limit);
    std::lock_guard lock(mutex_);
    // The thread that appended last may not have woken the worker yet; after this it could not.
    futex_wake(low_half(client_->head));
    vacate_locked();
  } catch (...) {
    {
      std::lock_guard lock(mutex_);
      if (place_ == Place::leaving) place_ = Place::present;
    }
    turn();
    throw;
  }
  std::lock_guard lock(bell_mutex_);
  bell_fd_ = -1;
}

void Session::vacate_locked() {
  Mapping client = private_copy(client_.mapping(), true);
  Mapping worker = private_copy(worker_.mapping(), false);
  Mapping agent = private_copy(agent_.mapping(), false);
  place_ = Place::away;  // set first: if a step below fails, there is no way back
  log_file_.close();
  reserve_at(log_map_);
  replace_mapping(client_.mapping(), std::move(client));
  replace_mapping(worker_.mapping(), std::move(worker));
  replace_mapping(agent_.mapping(), std::move(agent));
}

// ---------------------------------------------------------------- the thread that reattaches

void Session::rejoin(int log_fd, int client_fd, int worker_fd, int agent_fd, int bell_fd) {
  // Everything is checked before anything is replaced.
  TORCH_CHECK(file_bytes(log_fd) == capacity_, "the log has another size than the one left");
  Page<ClientPage> client = map_page<ClientPage>(client_fd, true);
  auto worker = map_page<const WorkerPage>(worker_fd, false, kAnswerRingBytes);
  auto agent = map_page<const AgentPage>(agent_fd, false);
  {
    std::lock_guard lock(mutex_);
    TORCH_CHECK(place_ == Place::away, "the process has not left its device session");
    TORCH_CHECK(!agent_gone_.load(), "the process has given up its device session");
    TORCH_CHECK(client->head.load() == head_ && agent->retained.load() <= head_ &&
                    worker->consumed.load() <= head_,
                "the session is not where the process left it");
    copy_words(*client_, *client);
    map_ring_at(log_map_, log_fd, true);
    log_file_.open(log_fd);
    replace_mapping(agent_.mapping(), agent.take());
    replace_mapping(worker_.mapping(), worker.take());
    replace_mapping(client_.mapping(), client.take());
    settle();
    client_->cell_changed_ns.store(monotonic_ns(clock_ahead_ns_));
    rung_once_ = false;
    place_ = Place::present;
    std::lock_guard bell(bell_mutex_);
    bell_fd_ = bell_fd;
  }
  turn();
  // Waiting threads had rung before the detach; they check again.
  futex_wake(low_half(client_->head));
  ring();
}

}  // namespace sing::client
