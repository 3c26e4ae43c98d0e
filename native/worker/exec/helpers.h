// Compute threads that help the worker's main thread on a software device.
//
// Note [Helpers]: libgomp's threads spin for milliseconds after each parallel region. While the log
// is long, that is right: the next region comes at once, and waking a thread costs more than many
// operators. While the worker mostly waits for the notebook's next record, it is wrong: the
// spinning threads occupy the core on which the notebook would write it. Libgomp has no call to
// change this, but it spins only shortly while its threads outnumber the cores (GOMP_SPINCOUNT in
// its manual). So one extra thread, with a helper of its own, is kept asleep as long as the helpers
// are to sleep.
#pragma once

#include <cstdint>
#include <memory>

namespace sing {

class Helpers {
 public:
  // `threads`: compute threads of the device, including the main thread.
  explicit Helpers(int threads);
  ~Helpers();
  Helpers(const Helpers&) = delete;
  Helpers& operator=(const Helpers&) = delete;

  // Reports that records were executed for `busy_ns` since the last report; the time is `now_ns`.
  void worked(uint64_t now_ns, uint64_t busy_ns);
  // Reports that the worker has reached the end of the log.
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
