// How far a notebook may be ahead of the execution.
//
// Note [Pace]: CUDA makes whoever launches a kernel wait while about a thousand others are queued.
// A loop that asks for nothing back would otherwise fill the log with minutes of work, which no
// interrupt takes back, and which the next cell has to wait for. So a notebook is held up here,
// too, though later where records are quick: as much may be ahead as the worker has executed in
// about a second. Otherwise records are counted, not bytes, so that an upload does not wait for the
// computations before it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace sing::client {

class Pace {
 public:
  // About so many records may be ahead of any worker.
  static constexpr uint64_t kRecords = 1024;
  // What a worker executes is looked at over this time, up to twice as long.
  static constexpr uint64_t kLookNs = 500'000'000;

  // Whether to ask, having written so many records.
  bool due(uint64_t records) const noexcept { return records >= due_; }

  // What has to be executed before the next record is written at `head`: a position, or 0 if there
  // is no need to wait. `consumed` is executed at the time `now_ns`.
  uint64_t mark(uint64_t records, uint64_t head, uint64_t consumed, uint64_t now_ns) noexcept {
    due_ = records + kStride;
    if (now_ns - looked_ns_ >= kLookNs) {
      looked_ns_ = now_ns;
      earlier_ = recent_;
      recent_ = consumed;
    }
    // After a worker's death another one begins where it was saved.
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

  std::array<uint64_t, kMarks> marks_{};  // the head after each stride, as a ring
  size_t next_ = 0;
  uint64_t due_ = kStride;
  uint64_t looked_ns_ = 0, recent_ = 0, earlier_ = 0;  // what was executed when it was looked at
};

}  // namespace sing::client
