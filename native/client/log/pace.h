// Back-pressure: limits how far a notebook may be ahead of the execution.
//
// Note [Pace]: CUDA makes a thread that launches a kernel wait while about a thousand others are
// queued. Otherwise a loop that makes no request would fill the log with minutes of work, which no
// interrupt can undo, and for which the next cell has to wait. So a notebook has to wait here, too,
// though later if records are quick: as many may be ahead as the worker has executed in about a
// second. Records are counted, not bytes, so that an upload does not wait for the computations
// before it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace sing::client {

class Pace {
 public:
  // About so many records may be ahead of any worker, however slow.
  static constexpr uint64_t kRecords = 1024;
  // The worker's progress is measured over this time, up to twice as long.
  static constexpr uint64_t kLookNs = 500'000'000;

  // True if mark() is to be called, now that so many records were written.
  bool due(uint64_t records) const noexcept { return records >= due_; }

  // Returns what has to be executed before the next record is written at `head`: a position, or 0
  // if there is no need to wait. `consumed` is executed at the time `now_ns`.
  uint64_t mark(uint64_t records, uint64_t head, uint64_t consumed, uint64_t now_ns) noexcept {
    due_ = records + kStride;
    if (now_ns - looked_ns_ >= kLookNs) {
      looked_ns_ = now_ns;
      earlier_ = recent_;
      recent_ = consumed;
    }
    // After a worker's death the next one starts from an earlier position: the snapshot.
    const uint64_t executed = consumed - std::min(earlier_, consumed);
    const uint64_t oldest = marks_[next_];
    marks_[next_] = head;
    next_ = (next_ + 1) % kMarks;
    if (consumed >= oldest || head - consumed <= executed) return 0;
    return std::min(marks_[(next_ + kMarks / 2 - 1) % kMarks], head - executed / 2);
  }

 private:
  static constexpr size_t kMarks = 8;
  static constexpr uint64_t kStride = kRecords / kMarks;

  std::array<uint64_t, kMarks> marks_{};  // the head after each stride, as a ring buffer
  size_t next_ = 0;
  uint64_t due_ = kStride;
  uint64_t looked_ns_ = 0, recent_ = 0, earlier_ = 0;  // time and position of the last measurement,
                                                       // and the position before
};

}  // namespace sing::client
