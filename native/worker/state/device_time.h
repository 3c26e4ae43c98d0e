// Time of a device other than the CPU, by its own clock.
//
// Note [Device time]. Such a device works behind the worker. Marks show how far it is: timing
// events on its computing stream, one after every few records, and one where the log ends. The time
// between a mark and the next one is time for which the session had the device, except while it was
// at rest or the worker was parked: then the next mark begins another stretch.
//
// The worker does not run ahead as far as the driver would let it: taking the device from a session
// waits for all of that. The bound is an estimate. Records are assumed to take as long as the last
// ones did, or as long as those that are being executed have taken by now. So after a sudden change
// from short kernels to long ones more may be in flight, up to all marks and their records.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace sing {

using EventPtr = std::shared_ptr<c10::Event>;

// The stream on which a device's operators are executed.
c10::Stream computing_stream(c10::Device device);

// A timing event on that stream.
EventPtr record_time(c10::Device device);

// The time that a device loses: what passes on its computing stream between two points of it that
// would otherwise follow each other at once.
class LostTime {
 public:
  void add(EventPtr began, EventPtr ended) {
    spans_.emplace_back(std::move(began), std::move(ended));
  }
  // Waits for the device, and returns the sum since the last call.
  uint64_t take_ns();

 private:
  std::vector<std::pair<EventPtr, EventPtr>> spans_;
};

// An event of which the host's time is known. The driver tells the time between two events in
// single precision: an anchor must not be too old.
struct Anchor {
  EventPtr event;
  int64_t ns;  // CLOCK_MONOTONIC
};

// A point of a program's work: CLOCK_MONOTONIC, or an event that gives it once it is past.
struct Stamp {
  int64_t ns = 0;  // if there is no event
  EventPtr event;
  std::shared_ptr<const Anchor> anchor;

  // Waits for the event.
  int64_t resolve() const;
};

// Waits for both.
double elapsed_ms(const Stamp& from, const Stamp& to);

// Of the main thread, and of another one while the main thread is parked.
class DeviceTime {
 public:
  static constexpr uint64_t kAheadNs = 100'000'000;
  static constexpr size_t kMarksMax = 64;
  static constexpr uint64_t kRecordsPerMark = 16;

  explicit DeviceTime(c10::Device device) : device_(device) {}

  // --- around each record that may give the device something to do; `position`: where the log is
  // executed up to
  // True if there is enough in flight: the record is to wait, by nap() and another question.
  bool full(uint64_t position);
  static void nap();
  void begin_record(uint64_t position);
  void end_record(uint64_t position);

  // --- between two records
  // Marks the end of what was started.
  void finish(uint64_t position);
  // Takes note of the marks that are past.
  void poll();
  // Waits until all are past, at most for some time.
  void settle(uint64_t within_ns);
  // True if all that was started is known to be executed.
  bool rests() const noexcept { return pending_.empty() && unmarked_ == 0; }
  // The position below which everything is known to be executed.
  uint64_t completed() const noexcept { return completed_; }
  // The session's time on the device since the last call, as far as it is known.
  uint64_t take_busy_ns() noexcept { return std::exchange(busy_ns_, 0); }
  // This point of the computing stream.
  Stamp stamp();

  // --- what the device loses by snapshots
  // Before the main thread parks, and when it continues. `only_work`: it was parked only for the
  // work of other threads. `waiting`: there are records to execute.
  void pause(uint64_t position);
  void resume(uint64_t position, bool only_work, bool waiting);
  // While it is parked: this is for a snapshot.
  void freeze() noexcept { frozen_ = paused_ != nullptr; }
  // Any thread. Waits for the device. The time lost by pauses for snapshots since the last call.
  uint64_t take_lost_ns();

 private:
  struct Mark {
    EventPtr event;
    uint64_t position;
    uint64_t records;  // since the mark before
    bool begins;       // the time up to it is not the session's
  };
  struct Span {
    uint64_t ns = 0, records = 0;
  };

  void mark(uint64_t position, bool begins);
  void begin(uint64_t position);
  void tie(const EventPtr& event, uint64_t before_ns);
  void pass();
  void note(Span span) noexcept;
  bool over() const noexcept;

  const c10::Device device_;
  std::deque<Mark> pending_;
  std::vector<EventPtr> free_;
  uint64_t unmarked_ = 0;   // records since the last mark
  uint64_t in_flight_ = 0;  // records that are not known to be executed
  uint64_t per_mark_ = kRecordsPerMark;
  std::shared_ptr<const Anchor> anchor_;
  bool tied_ = false;         // the anchor's time was read as soon as it was past
  int64_t passed_ns_ = 0;     // when the last mark was passed, by the device's clock
  uint64_t progress_ns_ = 0;  // when that was seen, or a stretch began
  uint64_t completed_ = 0;
  uint64_t busy_ns_ = 0;
  // The last spans between marks.
  std::array<Span, 16> recent_{};
  size_t oldest_ = 0;
  Span sum_;
  uint64_t each_ns_ = 0;  // for a record

  EventPtr paused_;  // where the main thread parked
  bool frozen_ = false;
  bool interrupted_ = false;  // the next record begins a stretch
  // A pause at whose end there was nothing to execute.
  std::optional<std::pair<EventPtr, EventPtr>> idle_;
  std::mutex mutex_;
  LostTime lost_;  // under the lock
};

}  // namespace sing
