// Since when executing the log again may give other values than those that the notebook has read.
//
// Note [Exactness]: on a GPU some kernels give other bytes each time (native/ops/inexact.h). That
// is of no consequence for a notebook that has read nothing since: one execution is as good as
// another. So a recovery is approximate since the first answer that followed such a kernel after
// the snapshot from which it starts; and, on another model of device, since the first answer after
// that snapshot, because there all kernels are others. The worker publishes these times for two
// snapshots, as the newest one may not be kept, and the worker that recovers publishes since when
// its state is approximate.
#pragma once

#include <cstdint>

#include "oplog/layout.h"
#include "worker/loop/clock.h"

namespace sing {

class Exactness {
 public:
  // An operator was executed that may give other bytes when it is executed again.
  void note_inexact() noexcept { newer_.inexact = true; }
  // A request was answered.
  void note_answer(WorkerPage& page) noexcept {
    if (newer_.answered_ns != 0 && (newer_.inexact_ns != 0 || !newer_.inexact)) [[likely]]
      return;
    const uint64_t now = monotonic_ns();
    older_.inexact |= newer_.inexact;
    newer_.note_answer(now);
    older_.note_answer(now);
    publish(page);
  }
  // A snapshot begins at `position`; `retained` is the position of the one that the agent has.
  void note_snapshot(uint64_t position, uint64_t retained, WorkerPage& page) noexcept {
    if (retained >= page.frozen.load(std::memory_order_relaxed)) older_ = newer_;
    older_.inexact |= newer_.inexact;
    newer_ = {};
    page.frozen.store(position, std::memory_order_relaxed);
    publish(page);
  }
  // A worker begins with a snapshot of `position`, on a device of this model. Returns since when
  // its state is approximate when it has executed the log again as far as earlier workers had: 0 if
  // it is not; and since when there were answers.
  struct Recovery {
    uint64_t inexact_ns = 0;
    uint64_t answered_ns = 0;
  };
  Recovery begin(uint64_t position, uint64_t model, WorkerPage& page) noexcept {
    Recovery found;
    if (page.consumed.load() > position || page.furthest.load() > position) {
      const bool kept = position >= page.frozen.load();
      found.answered_ns = (kept ? page.answered_ns : page.older_answered_ns).load();
      found.inexact_ns = (kept ? page.inexact_ns : page.older_inexact_ns).load();
      const uint64_t before = page.device_model.load();
      if (before != 0 && before != model) found.inexact_ns = found.answered_ns;
    }
    newer_ = older_ = {};
    page.device_model.store(model);
    page.frozen.store(position);
    publish(page);
    return found;
  }
  // A worker continues where another one of the same device has stopped, and a recovery still
  // starts from the same snapshot.
  void continue_from(const WorkerPage& page) noexcept {
    newer_.answered_ns = page.answered_ns.load();
    newer_.inexact_ns = page.inexact_ns.load();
    older_.answered_ns = page.older_answered_ns.load();
    older_.inexact_ns = page.older_inexact_ns.load();
    newer_.inexact = newer_.inexact_ns != 0;
    older_.inexact = older_.inexact_ns != 0;
  }

 private:
  struct Since {
    bool inexact = false;
    uint64_t answered_ns = 0;
    uint64_t inexact_ns = 0;

    void note_answer(uint64_t now) noexcept {
      if (answered_ns == 0) answered_ns = now;
      if (inexact_ns == 0 && inexact) inexact_ns = now;
    }
  };

  void publish(WorkerPage& page) const noexcept {
    page.answered_ns.store(newer_.answered_ns, std::memory_order_relaxed);
    page.inexact_ns.store(newer_.inexact_ns, std::memory_order_relaxed);
    page.older_answered_ns.store(older_.answered_ns, std::memory_order_relaxed);
    page.older_inexact_ns.store(older_.inexact_ns, std::memory_order_relaxed);
  }

  Since newer_, older_;  // since the newest snapshot, and since the one before it
};

}  // namespace sing
