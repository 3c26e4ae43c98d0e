#include "worker/loop/api.h"

#include <malloc.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>

#include "worker/loop/session.h"
#include "worker/loop/warm.h"
#include "worker/state/blocks.h"

namespace {

std::unique_ptr<sing::Session> session;
thread_local std::string error;
thread_local sing_worker_loss loss{};
thread_local std::string lost_operation;
void (*ask_for_room)(void) = nullptr;

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

sing::Session& opened() {
  if (!session) throw std::runtime_error("no session is open");
  return *session;
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
    if (session) throw std::runtime_error("a session is open already");
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
    const char* check = std::getenv("SING_CHECK_WRITES");
    options.limits.check_writes = check != nullptr && std::string_view(check) == "1";
    const sing::SessionFiles all{files->log,   files->client,   files->worker,   files->agent,
                                 files->arena, files->snapshot, files->readiness};
    session = std::make_unique<sing::Session>(all, options);
    return 0;
  });
}

void sing_worker_on_no_room(void (*ask)(void)) { ask_for_room = ask; }

int sing_worker_run() {
  return guarded([] {
    try {
      opened().run();
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

int sing_worker_gate(int open) {
  return guarded([&] {
    opened().gate(open != 0);
    return 0;
  });
}

int sing_worker_lease(uint64_t token, int given) {
  return guarded([&] {
    opened().lease(token, given != 0);
    return 0;
  });
}

int sing_worker_take_lease(uint64_t token, uint64_t within_ns) {
  return guarded([&] {
    opened().take_lease(token, within_ns);
    return 0;
  });
}

int sing_worker_observe(uint64_t since_ns, sing_worker_step* step) {
  return guarded([&] {
    const auto found = opened().step(since_ns).value_or(sing::Steps::Found{});
    *step = {found.records, found.nadir, found.memory_min, found.memory_max, found.made, found.ns};
    return 0;
  });
}

int sing_worker_await_parked() {
  return guarded([] {
    opened().await_parked();
    return 0;
  });
}

int sing_worker_give_back_cache() {
  return guarded([] {
    opened().give_back_cache();
    return 0;
  });
}

void sing_worker_end() {
  if (session) session->end();
}

int sing_worker_snapshot(int manner, void (*frozen)(void), sing_worker_taken* taken) {
  return guarded([&] {
    const sing::Taken made = opened().snapshot(static_cast<sing::Manner>(manner), frozen);
    *taken = {made.position, made.bytes, made.copied, made.stalled_ns, made.duration_ns};
    return made.fd;
  });
}

void sing_worker_hurry() {
  if (session) session->hurry();
}

int sing_worker_replay(uint64_t until) {
  return guarded([&] {
    opened().replay(until);
    return 0;
  });
}

int sing_worker_trim() {
  return guarded([] {
    opened().trim();
    return 0;
  });
}

int sing_worker_adopt(int snapshot) {
  return guarded([&] {
    opened().adopt(snapshot);
    return 0;
  });
}

void sing_worker_lost(sing_worker_loss* into) { *into = loss; }

const char* sing_worker_error() { return error.c_str(); }
