// What a session's log says of its progress: its step, how long one takes, and where in it memory
// is least.
//
// A training program issues the same operators on the same shapes again and again. A stretch of the
// log that repeats is a step: how fast steps follow each other is progress that needs no help of
// the program, and the place of a step where least memory is in use is the cheapest one to stop at.
// Gandiva (OSDI 2018) finds both from memory alone; a log of operators says it exactly.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace sing {

class Steps {
 public:
  // Records that are looked back upon: a step may have a third of them.
  static constexpr uint64_t kRecords = uint64_t{1} << 14;
  // Repetitions after which a stretch counts as a step.
  static constexpr uint64_t kRepeatsMin = 3;
  // One in so many records may differ: real programs print now and then.
  static constexpr uint64_t kDifferent = 10;

  struct Found {
    uint64_t records;  // of one step
    uint64_t nadir;    // of those, which one leaves least memory in use; steps end with the log
    uint64_t memory_min, memory_max;  // within the last step, in bytes
    uint64_t made, ns;                // records since the moment asked for, and their time
  };

  // --- the main thread ---
  // After a record: what it did (the same for the same operator on the same shapes), when, and the
  // bytes of live storages.
  void note(uint64_t kind, uint64_t now, uint64_t memory) noexcept {
    const uint64_t count = count_.load(std::memory_order_relaxed);
    Noted& noted = (*noted_)[count % kRecords];
    noted.at.store(now, std::memory_order_relaxed);
    noted.kind.store(kind, std::memory_order_relaxed);
    noted.memory.store(memory, std::memory_order_relaxed);
    if (count % kBetweenMarks == 0) {
      (*marks_)[count / kBetweenMarks % kMarks].store(now, std::memory_order_relaxed);
    }
    count_.store(count + 1, std::memory_order_release);
  }
  // Something was freed since the last record that was noted.
  void amend(uint64_t memory) noexcept {
    const uint64_t count = count_.load(std::memory_order_relaxed);
    if (count) (*noted_)[(count - 1) % kRecords].memory.store(memory, std::memory_order_relaxed);
  }
  // Whether the place is reached that another thread has aimed at.
  bool reached() const noexcept {
    return count_.load(std::memory_order_relaxed) >= due_.load(std::memory_order_relaxed);
  }

  // --- any other thread ---
  // The step that the log ends with, or nothing where nothing repeats. `since`: see Found, in ns of
  // the monotonic clock.
  std::optional<Found> find(uint64_t since) const;
  // Aims at the next nadir. False if there is no step.
  bool aim();
  void aim_at_nothing() noexcept { due_.store(kNever, std::memory_order_relaxed); }
  uint64_t count() const noexcept { return count_.load(std::memory_order_relaxed); }

 private:
  static constexpr uint64_t kNever = UINT64_MAX;

  struct Noted {
    std::atomic<uint64_t> at{0}, kind{0}, memory{0};
  };
  struct Stretch {
    std::vector<uint64_t> at, kinds, memory;
    uint64_t end = 0;  // number of the record after it
  };
  // Of small operators 2^14 are over in a tenth of a second. How long more of them took is told by
  // the times of one in so many.
  static constexpr uint64_t kBetweenMarks = 256;
  static constexpr uint64_t kMarks = uint64_t{1} << 12;
  static constexpr uint64_t kLongNs = 1'000'000'000;

  Stretch copy() const;
  static std::optional<Found> find(const Stretch& stretch);
  void measure(const Stretch& stretch, uint64_t since, Found& found) const;

  // Rings.
  std::unique_ptr<std::array<Noted, kRecords>> noted_ =
      std::make_unique<std::array<Noted, kRecords>>();
  std::unique_ptr<std::array<std::atomic<uint64_t>, kMarks>> marks_ =
      std::make_unique<std::array<std::atomic<uint64_t>, kMarks>>();
  std::atomic<uint64_t> count_{0};     // noted so far
  std::atomic<uint64_t> due_{kNever};  // count at which to stop
};

}  // namespace sing
