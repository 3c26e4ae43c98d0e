#include "client/log/forks.h"

#include <pthread.h>

#include <new>
#include <vector>

#include <c10/util/Exception.h>

namespace sing::client {

namespace {

struct Watched {
  std::vector<std::mutex*> held;
  std::vector<std::mutex*> fresh;
  std::function<void()> begin_child;

  static Watched& get() {
    static auto* instance = new Watched();
    return *instance;
  }
};

void before_fork() {
  for (std::mutex* mutex : Watched::get().held) mutex->lock();
}

void after_fork() {
  for (std::mutex* mutex : Watched::get().held) mutex->unlock();
}

void in_child() {
  Watched& watched = Watched::get();
  watched.begin_child();
  for (std::mutex* mutex : watched.fresh) new (mutex) std::mutex;
  after_fork();
}

}  // namespace

HeldAtFork::HeldAtFork(std::mutex& mutex) { Watched::get().held.push_back(&mutex); }

FreshAfterFork::FreshAfterFork(std::mutex& mutex) { Watched::get().fresh.push_back(&mutex); }

void watch_forks(std::function<void()> begin_child) {
  Watched& watched = Watched::get();
  if (watched.begin_child) return;
  watched.begin_child = std::move(begin_child);
  TORCH_CHECK(pthread_atfork(&before_fork, &after_fork, &in_child) == 0,
              "forks of this process cannot be watched");
}

}  // namespace sing::client
