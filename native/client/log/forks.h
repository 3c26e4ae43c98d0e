// Mutexes that outlive the fork of a process: another thread may hold one at that moment, and no
// thread of the child would ever unlock it.
#pragma once

#include <functional>
#include <mutex>

namespace sing::client {

// A mutex that is held only briefly, and never while its holder waits for the GIL: the thread that
// forks holds it during the fork, so what it protects is whole in the child.
class HeldAtFork {
 public:
  explicit HeldAtFork(std::mutex& mutex);
};

// A mutex whose holder may wait for another process: it is unlocked in the child.
class FreshAfterFork {
 public:
  explicit FreshAfterFork(std::mutex& mutex);
};

// Calls a function in each child from now on, before the mutexes are unlocked. Idempotent: only the
// first call has an effect.
void watch_forks(std::function<void()> begin_child);

}  // namespace sing::client
