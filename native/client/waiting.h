// Waiting for another process from a thread that may hold Python's lock (Note [GIL] in session.h).
#pragma once

#include <chrono>
#include <mutex>

struct _ts;  // PyThreadState

namespace sing::client {

// While it lives, this thread does not hold the GIL.
class Waiting {
 public:
  Waiting();
  ~Waiting();
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

  // Runs Python's signal handlers if the last run is some time ago (or `now`); throws what they
  // raise, as python_error, so that KeyboardInterrupt leaves a wait.
  void check_signals(bool now);

 private:
  _ts* state_;
  std::chrono::steady_clock::time_point checked_;
};

// Locks a mutex whose holder may need the GIL.
inline std::unique_lock<std::mutex> lock_without_gil(std::mutex& mutex) {
  std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
  if (!lock.owns_lock()) {
    Waiting waiting;
    lock.lock();
  }
  return lock;
}

}  // namespace sing::client
