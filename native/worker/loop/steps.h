// Progress of a session, found in its log: its step, how long one takes, and where in it memory use
// is lowest.
//
// A training program issues the same operators on the same shapes in each step. A stretch of the
// log that repeats is a step. The rate of steps measures progress without any help of the program,
// and the point of a step where least memory is in use is the cheapest one to stop at. Gandiva
// (OSDI 2018) finds both from memory use alone; a log of operators shows them exactly.
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
  // Number of records that are remembered: a step may have a third of them.
  static constexpr uint64_t kRecords = uint64_t{1} << 14;
  // Number of repetitions after which a stretch counts as a step.
  static constexpr uint64_t kRepeatsMin = 3;
  // One in so many records may differ: real programs print from time to time.
  static constexpr uint64_t kDifferent = 10;

  struct Found {
    uint64_t records;  // of one step
    uint64_t nadir;    // which of those leaves least memory in use; steps end at the end of the log
    uint64_t memory_min, memory_max;  // within the last step, in bytes
    uint64_t made, ns;                // records since the given time, and how long they took
  };

  // --- the main thread ---
  // Notes a record: what it did (the same for the same operator on the same shapes), when, and the
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
  // Corrects the memory of the last noted record: storages were freed since.
  void amend(uint64_t memory) noexcept {
    const uint64_t count = count_.load(std::memory_order_relaxed);
    if (count) (*noted_)[(count - 1) % kRecords].memory.store(memory, std::memory_order_relaxed);
  }
  // True if the record is reached at which another thread has aimed.
  bool reached() const noexcept {
    return count_.load(std::memory_order_relaxed) >= due_.load(std::memory_order_relaxed);
  }

  // --- any other thread ---
  // Returns the step with which the log ends, or nothing if nothing repeats. `since`: see Found, in
  // ns of the monotonic clock.
  std::optional<Found> find(uint64_t since) const;
  // Aims at the next nadir. Returns false if there is no step.
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
  // With small operators, 2^14 records take only a tenth of a second. Marks, the times of one in so
  // many records, measure longer stretches.
  static constexpr uint64_t kBetweenMarks = 256;
  static constexpr uint64_t kMarks = uint64_t{1} << 12;
  static constexpr uint64_t kLongNs = 1'000'000'000;

  Stretch copy() const;
  static std::optional<Found> find(const Stretch& stretch);
  void measure(const Stretch& stretch, uint64_t since, Found& found) const;

  // Ring buffers.
  std::unique_ptr<std::array<Noted, kRecords>> noted_ =
      std::make_unique<std::array<Noted, kRecords>>();
  std::unique_ptr<std::array<std::atomic<uint64_t>, kMarks>> marks_ =
      std::make_unique<std::array<std::atomic<uint64_t>, kMarks>>();
  std::atomic<uint64_t> count_{0};     // noted so far
  std::atomic<uint64_t> due_{kNever};  // count at which to stop
};

}  // namespace sing
