#include "worker/loop/api.h"

#include <malloc.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "worker/loop/seat.h"
#include "worker/loop/session.h"
#include "worker/loop/warm.h"
#include "worker/replicas/replicas.h"
#include "worker/state/blocks.h"

namespace {

std::unique_ptr<sing::Seat> seat;
std::unique_ptr<sing::Replicas> replicas;  // of the seat
std::mutex sessions_mutex;
std::map<int, std::shared_ptr<sing::Session>> sessions;  // under the mutex
int sessions_opened = 0;                                 // under the mutex
thread_local std::string error;
thread_local sing_worker_loss loss{};
thread_local std::string lost_operation;
thread_local void (*ask_for_room)(void) = nullptr;
thread_local std::vector<sing::Share> pinned;

// No exception may leave a function that C calls.
template <class Work>
int guarded(Work work) noexcept {
  try {
    return work();
  } catch (const sing::DeviceLost& lost) {
    try {
      error = lost.what();
      lost_operation = lost.operation;
    } catch (...) {  // no memory for the texts
    }
    loss = {lost.code, lost.position, lost_operation.c_str()};
    return SING_WORKER_LOST;
  } catch (const std::exception& exception) {
    try {
      error = exception.what();
    } catch (...) {  // no memory for the text
      error.clear();
    }
  } catch (...) {
    error.clear();
  }
  return -1;
}

// Training steps free and allocate the same megabytes in each step. If they are kept, as a GPU's
// caching allocator keeps them, they cost no page faults. For larger blocks see Note [Blocks].
void keep_freed_memory(bool blocks) {
  constexpr int kBlockBytes = sing::Blocks::kLeastBytes;  // the most that glibc allows
  constexpr int kKeptBytes = 256 << 20;
  mallopt(M_MMAP_THRESHOLD, kBlockBytes);
  mallopt(M_TRIM_THRESHOLD, kKeptBytes);
  mallopt(M_TOP_PAD, kBlockBytes);
  if (blocks) sing::Blocks::get().install();
}

bool is_on(const char* value) { return value != nullptr && std::string_view(value) == "1"; }

// Null if there is none of that number. It lives as long as it is used, see sing_worker_close().
std::shared_ptr<sing::Session> found(int number) {
  const std::lock_guard lock(sessions_mutex);
  const auto at = sessions.find(number);
  return at == sessions.end() ? nullptr : at->second;
}

std::shared_ptr<sing::Session> opened(int number) {
  auto session = found(number);
  if (!session) throw std::runtime_error("the session is not open");
  return session;
}

}  // namespace

int sing_worker_warm(const char* device) {
  return guarded([&] {
    sing::warm(c10::Device(device));
    return 0;
  });
}

int sing_worker_open(const sing_worker_files* files, const char* device, int threads,
                     uint64_t epoch, const sing_worker_skip* skip, int skip_count,
                     uint64_t careful_until, int prepare) {
  return guarded([&] {
    const auto until_opened = std::move(pinned);
    sing::SessionOptions options;
    options.device = c10::Device(device);
    bool starved = false;
    for (int i = 0; i < skip_count; ++i) {
      options.skip[skip[i].position] = {skip[i].why, skip[i].starved != 0};
      starved |= skip[i].starved != 0;
    }
    // If an earlier worker was killed for lack of host memory, this one keeps as little as it can.
    if (options.device.is_cpu()) keep_freed_memory(!starved);
    options.threads = threads;
    options.epoch = epoch;
    options.careful_until = careful_until;
    options.room = ask_for_room;
    options.prepare = prepare != 0;
    options.limits.check_writes = is_on(std::getenv("SING_CHECK_WRITES"));
    options.limits.check_splicing = is_on(std::getenv("SING_CHECK_SPLICING"));
    const sing::SessionFiles all{files->log,     files->client,   files->worker,    files->agent,
                                 files->arena,   files->snapshot, files->readiness, files->contents,
                                 files->carried, files->base};
    options.seat = seat.get();
    options.replicas = replicas.get();
    auto session = std::make_shared<sing::Session>(all, options);
    const std::lock_guard lock(sessions_mutex);
    sessions.emplace(sessions_opened, std::move(session));
    return sessions_opened++;
  });
}

uint64_t sing_worker_key_bytes() { return sing::key_bytes(); }

int sing_worker_seat(int threads, const void* key, uint64_t key_bytes) {
  return guarded([&] {
    if (seat) throw std::runtime_error("the seat exists already");
    sing::use_keys({static_cast<const std::byte*>(key), key_bytes});
    seat = std::make_unique<sing::Seat>(threads);
    replicas = std::make_unique<sing::Replicas>();
    return 0;
  });
}

int sing_worker_serve(int threads) {
  return guarded([&] {
    sing::settle_thread(threads);
    seat->serve();
    return 0;
  });
}

void sing_worker_end_seat() { seat->end(); }

int sing_worker_list_contents() {
  return guarded([&] {
    if (!replicas) throw std::runtime_error("this process is no seat");
    auto [shares, ids] = replicas->pin();
    pinned = std::move(shares);
    return sing::write_known(ids);
  });
}

void sing_worker_seat_figures(sing_worker_seat_counts* counts) {
  const auto switches = seat->switches();
  const auto figures = replicas->figures();
  *counts = {switches.count,   switches.ns,        figures.executed,
             figures.squashed, figures.recomputed, sing::Blocks::get().used_max()};
}

void sing_worker_close(int number) {
  std::shared_ptr<sing::Session> session;
  {
    const std::lock_guard lock(sessions_mutex);
    const auto at = sessions.find(number);
    if (at == sessions.end()) return;
    session = std::move(at->second);
    sessions.erase(at);
  }
}

void sing_worker_on_no_room(void (*ask)(void)) { ask_for_room = ask; }

int sing_worker_run(int number) {
  return guarded([&] {
    const auto session = opened(number);
    try {
      session->run();
      return 0;
    } catch (const sing::NoRoom& shortage) {
      error = shortage.what();
      return static_cast<int>(SING_WORKER_NO_ROOM);
    } catch (const sing::CorruptLog& fault) {
      error = "the record at position " + std::to_string(session->position()) +
              " of the device log cannot be executed: " + fault.what();
      return 1;
    }
  });
}

int sing_worker_gate(int session, int open) {
  return guarded([&] {
    opened(session)->gate(open != 0);
    return 0;
  });
}

int sing_worker_lease(int session, uint64_t token, int given) {
  return guarded([&] {
    opened(session)->lease(token, given != 0);
    return 0;
  });
}

int sing_worker_take_lease(int session, uint64_t token, uint64_t within_ns) {
  return guarded([&] {
    opened(session)->take_lease(token, within_ns);
    return 0;
  });
}

int sing_worker_observe(int session, uint64_t since_ns, sing_worker_step* step) {
  return guarded([&] {
    const auto found = opened(session)->step(since_ns).value_or(sing::Steps::Found{});
    *step = {found.records, found.nadir, found.memory_min, found.memory_max, found.made, found.ns};
    return 0;
  });
}

int sing_worker_await_parked(int session) {
  return guarded([&] {
    opened(session)->await_parked();
    return 0;
  });
}

int sing_worker_give_back_cache(int session, uint64_t* kept) {
  return guarded([&] {
    *kept = opened(session)->give_back_cache();
    return 0;
  });
}

void sing_worker_end(int session) {
  if (const auto open = found(session)) open->end();
}

int sing_worker_snapshot(int session, int manner, void (*frozen)(void), sing_worker_taken* taken) {
  return guarded([&] {
    const sing::Taken made = opened(session)->snapshot(static_cast<sing::Manner>(manner), frozen);
    *taken = {made.position, made.bytes, made.copied, made.stalled_ns, made.duration_ns};
    return made.fd;
  });
}

int sing_worker_depart(int session, int known, sing_worker_departed* into) {
  return guarded([&] {
    sing::Departed departed = opened(session)->depart(sing::read_known(known));
    *into = {departed.copied, departed.omitted, departed.tables.release(),
             departed.contents.release(), departed.carried.release()};
    return 0;
  });
}

void sing_worker_hurry(int session) {
  if (const auto open = found(session)) open->hurry();
}

void sing_worker_drop(int session) {
  if (const auto open = found(session)) open->drop_snapshot();
}

int sing_worker_replay(int session, uint64_t until) {
  return guarded([&] {
    opened(session)->replay(until);
    return 0;
  });
}

int sing_worker_trim(int session) {
  return guarded([&] {
    opened(session)->trim();
    return 0;
  });
}

int sing_worker_preallocate(int session) {
  return guarded([&] {
    opened(session)->preallocate();
    return 0;
  });
}

int sing_worker_adopt(int session, int snapshot) {
  return guarded([&] {
    opened(session)->adopt(snapshot);
    return 0;
  });
}

void sing_worker_lost(sing_worker_loss* into) { *into = loss; }

const char* sing_worker_error() { return error.c_str(); }
