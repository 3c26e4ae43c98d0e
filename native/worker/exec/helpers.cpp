#include "worker/exec/helpers.h"

#include <dlfcn.h>

#include <semaphore>
#include <thread>

namespace sing {

namespace {

constexpr uint64_t kWindowNs = 50'000'000;
// Mean length of work between two waits: below the first, helpers are to sleep; above the second,
// they are to spin. Token generation has 0.02 ms (1 ms when disturbed), training 4 ms and more.
constexpr uint64_t kShortNs = 1'200'000;
constexpr uint64_t kLongNs = 2'000'000;

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

// Entry point of torch's libgomp; null if torch uses another runtime.
Parallel parallel() {
  static const auto found = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return found;
}

}  // namespace

// See Note [Helpers]. The runtime counts a thread's team from its first region until it exits.
class Helpers::Crowd {
 public:
  explicit Crowd(Parallel parallel)
      : thread_([this, parallel] {
          parallel([](void*) {}, nullptr, 2, 0);
          dismissed_.acquire();
        }) {}
  ~Crowd() {
    dismissed_.release();
    thread_.join();
  }
  Crowd(const Crowd&) = delete;
  Crowd& operator=(const Crowd&) = delete;

 private:
  std::binary_semaphore dismissed_{0};
  std::thread thread_;
};

Helpers::Helpers(int threads) : any_(threads > 1 && parallel() != nullptr) {}

Helpers::~Helpers() = default;

void Helpers::worked(uint64_t now_ns, uint64_t busy_ns) {
  busy_ns_ += busy_ns;
  if (now_ns - window_began_ns_ < kWindowNs) return;
  if (any_ && busy_ns_ > kLongNs * waits_) {
    crowd_.reset();
  } else if (any_ && busy_ns_ < kShortNs * waits_ && crowd_ == nullptr) {
    crowd_ = std::make_unique<Crowd>(parallel());
  }
  window_began_ns_ = now_ns;
  busy_ns_ = 0;
  waits_ = 0;
}

}  // namespace sing
