#include "worker/api.h"

#include <memory>
#include <string>

#include "worker/session.h"

namespace {

std::unique_ptr<sing::Session> session;
thread_local std::string error;

// Nothing may leave a function that C calls but its result.
template <class Work>
int guarded(Work work) noexcept {
  try {
    return work();
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

sing::Session& opened() {
  if (!session) throw std::runtime_error("no session is open");
  return *session;
}

}  // namespace

int sing_worker_open(int log_fd, int client_fd, int worker_fd, int agent_fd, int snapshot_fd,
                     const char* device, int threads, uint64_t epoch, const uint64_t* skip,
                     int skip_count) {
  return guarded([&] {
    if (session) throw std::runtime_error("a session is open already");
    sing::SessionOptions options;
    options.device = c10::Device(device);
    options.threads = threads;
    options.epoch = epoch;
    if (skip_count > 0) options.skip.assign(skip, skip + skip_count);
    const sing::SessionFiles files{log_fd, client_fd, worker_fd, agent_fd, snapshot_fd};
    session = std::make_unique<sing::Session>(files, options);
    return 0;
  });
}

int sing_worker_run() {
  return guarded([] {
    try {
      opened().run();
      return 0;
    } catch (const sing::CorruptLog& fault) {
      error = "the record at position " + std::to_string(session->position()) +
              " of the device log cannot be executed: " + fault.what();
      return 1;
    }
  });
}

void sing_worker_gate(int open) {
  if (session) session->orders().gate(open != 0);
}

void sing_worker_end() {
  if (session) session->orders().end();
}

int sing_worker_snapshot(uint64_t* position, uint64_t* bytes) {
  return guarded([&] { return opened().snapshot(*position, *bytes); });
}

const char* sing_worker_error() { return error.c_str(); }
