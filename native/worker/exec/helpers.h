// The compute threads that help the worker's main thread on a software device.
//
// Note [Helpers]: libgomp's threads spin for milliseconds after each parallel region. While the log
// is long that is right: the next region comes at once, and to wake a thread costs more than many
// an operator. While the worker keeps waiting for the notebook's next record it is wrong: they hold
// the core on which the notebook would write it. Libgomp has no call that says so, but it spins
// only shortly while its threads outnumber the cores (GOMP_SPINCOUNT in its manual). So one thread
// more, with a helper of its own, is kept asleep as long as helpers are to sleep.
#pragma once

#include <cstdint>
#include <memory>

namespace sing {

class Helpers {
 public:
  // `threads`: compute threads of the device, the main thread being one.
  explicit Helpers(int threads);
  ~Helpers();
  Helpers(const Helpers&) = delete;
  Helpers& operator=(const Helpers&) = delete;

  // The worker has executed records for `busy_ns` since it last said so, and it is `now_ns`.
  void worked(uint64_t now_ns, uint64_t busy_ns);
  // The log is at its end.
  void waited() noexcept { ++waits_; }
  bool asleep() const noexcept { return crowd_ != nullptr; }

 private:
  class Crowd;

  const bool any_;
  uint64_t window_began_ns_ = 0;
  uint64_t busy_ns_ = 0;
  uint64_t waits_ = 0;
  std::unique_ptr<Crowd> crowd_;
};

}  // namespace sing
