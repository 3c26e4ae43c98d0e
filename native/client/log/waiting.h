// Waiting for another process from a thread that may hold Python's lock (Note [GIL] in session.h).
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>

struct _ts;  // PyThreadState

namespace sing::client {

// Releases the GIL of this thread while an instance exists.
//
// Note [Interrupts]: Python runs signal handlers on the main thread only. There, a wait lets them
// run and throws what they raise. Autograd waits on threads of its own while the main thread is in
// backward(), where Python cannot interrupt it. Such a wait watches for SIGINT itself and ends with
// an error, upon which the main thread returns to Python and raises KeyboardInterrupt.
class Waiting {
 public:
  Waiting();
  ~Waiting();
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

  // Checks for signals if the last check is some time ago, or `now`; throws if the wait must end.
  void check_signals(bool now);

 private:
  void run_handlers();

  _ts* state_;
  const bool on_main_thread_;
  uint32_t interrupts_ = 0;
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
