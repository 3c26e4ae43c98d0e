#include "worker/state/device_time.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <time.h>

#include <algorithm>
#include <cmath>

#include "worker/loop/clock.h"
#include "worker/loop/spin.h"

namespace sing {

namespace {

// Device time between two marks, where records take so long that fewer belong to one.
constexpr uint64_t kSpanNs = 5'000'000;
constexpr int64_t kAnchorNs = 4'000'000'000;  // then, single precision is half a microsecond
// A device at rest reaches an event within this time, unless another process has it.
constexpr uint64_t kAtOnceNs = 100'000;
constexpr long kNapNs = 100'000;

int64_t after(const Anchor& anchor, const c10::Event& event) {
  return anchor.ns + std::llround(anchor.event->elapsedTime(event) * 1e6);
}

}  // namespace

c10::Stream computing_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getDefaultStream(device);
}

EventPtr record_time(c10::Device device) {
  auto event = std::make_shared<c10::Event>(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  event->record(computing_stream(device));
  return event;
}

uint64_t LostTime::take_ns() {
  double ms = 0;
  for (const auto& [began, ended] : spans_) {
    ended->synchronize();
    ms += began->elapsedTime(*ended);
  }
  spans_.clear();
  return static_cast<uint64_t>(std::max(ms, 0.0) * 1e6);
}

int64_t Stamp::resolve() const {
  if (!event) return ns;
  event->synchronize();
  return after(*anchor, *event);
}

double elapsed_ms(const Stamp& from, const Stamp& to) {
  if (from.event && to.event) {
    from.event->synchronize();
    to.event->synchronize();
    return from.event->elapsedTime(*to.event);
  }
  return static_cast<double>(to.resolve() - from.resolve()) / 1e6;
}

// ---------------------------------------------------------------- marks

void DeviceTime::mark(uint64_t position, bool begins) {
  EventPtr event;
  if (!free_.empty()) {
    event = std::move(free_.back());
    free_.pop_back();
    event->record(computing_stream(device_));
  } else {
    event = record_time(device_);
  }
  pending_.push_back({std::move(event), position, unmarked_, begins});
  unmarked_ = 0;
}

// Makes the event an anchor, if one is due. It was just recorded, and the device is at rest.
void DeviceTime::tie(const EventPtr& event, uint64_t before_ns) {
  if (tied_ && static_cast<int64_t>(before_ns) - anchor_->ns < kAnchorNs) return;
  bool past = event->query();
  uint64_t now = monotonic_ns();
  while (!past && now - before_ns < kAtOnceNs) {
    relax();
    past = event->query();
    now = monotonic_ns();
  }
  const bool at_once = past && now - before_ns <= kAtOnceNs;
  if (!at_once && anchor_) return;
  anchor_ = std::make_shared<Anchor>(event, static_cast<int64_t>(at_once ? now : before_ns));
  tied_ = at_once;
}

void DeviceTime::begin(uint64_t position) {
  const bool rests = pending_.empty();
  const uint64_t now = monotonic_ns();
  mark(position, /*begins=*/true);
  interrupted_ = false;
  if (!rests) return;
  tie(pending_.back().event, now);
  progress_ns_ = now;
  completed_ = position;
}

void DeviceTime::begin_record(uint64_t position) {
  if (unmarked_ != 0) return;
  poll();
  if (idle_) {
    // The record waits for the rest of what the snapshot has given the device.
    if (!idle_->second->query()) {
      std::lock_guard lock(mutex_);
      lost_.add(idle_->first, idle_->second);
    }
    idle_.reset();
  }
  if (pending_.empty() || interrupted_) begin(position);
}

void DeviceTime::end_record(uint64_t position) {
  ++in_flight_;
  if (++unmarked_ >= per_mark_) mark(position, /*begins=*/false);
}

void DeviceTime::finish(uint64_t position) {
  if (unmarked_ != 0) mark(position, /*begins=*/false);
}

void DeviceTime::poll() {
  while (!pending_.empty() && pending_.front().event->query()) pass();
}

void DeviceTime::pass() {
  const Mark& mark = pending_.front();
  const int64_t now = after(*anchor_, *mark.event);
  if (!mark.begins) {
    const uint64_t ns = static_cast<uint64_t>(std::max<int64_t>(now - passed_ns_, 0));
    busy_ns_ += ns;
    if (mark.records != 0) note({ns, mark.records});
  }
  passed_ns_ = now;
  progress_ns_ = monotonic_ns();
  completed_ = mark.position;
  in_flight_ -= mark.records;
  if (now - anchor_->ns >= kAnchorNs) {
    anchor_ = std::make_shared<Anchor>(mark.event, now);
  } else if (mark.event.use_count() == 1) {
    free_.push_back(mark.event);
  }
  pending_.pop_front();
}

void DeviceTime::settle(uint64_t within_ns) {
  const uint64_t began = monotonic_ns();
  for (poll(); !pending_.empty() && monotonic_ns() - began < within_ns; poll()) nap();
}

// ---------------------------------------------------------------- the bound

void DeviceTime::note(Span span) noexcept {
  Span& place = recent_[oldest_];
  oldest_ = (oldest_ + 1) % recent_.size();
  sum_.ns += span.ns - place.ns;
  sum_.records += span.records - place.records;
  place = span;
  each_ns_ = sum_.ns / sum_.records;
  per_mark_ = std::clamp<uint64_t>(kSpanNs / std::max<uint64_t>(each_ns_, 1), 1, kRecordsPerMark);
}

bool DeviceTime::over() const noexcept {
  if (in_flight_ == 0) return false;
  if (pending_.size() >= kMarksMax) return true;
  uint64_t each = each_ns_, done = 0;
  if (!pending_.empty()) {
    const uint64_t records = std::max<uint64_t>(pending_.front().records, 1);
    const uint64_t waited = monotonic_ns() - progress_ns_;
    // A few records are no reason to wait: they may be short ones behind a long one.
    if (in_flight_ > kRecordsPerMark) each = std::max(each, waited / records);
    done = std::min(waited, records * each);
  }
  return in_flight_ * each - done > kAheadNs;
}

bool DeviceTime::full(uint64_t position) {
  if (!over()) return false;
  poll();
  if (!over()) return false;
  if (pending_.empty()) mark(position, /*begins=*/false);  // shows when the wait is over
  return true;
}

void DeviceTime::nap() {
  const timespec nap{0, kNapNs};
  clock_nanosleep(CLOCK_MONOTONIC, 0, &nap, nullptr);
}

// ---------------------------------------------------------------- times of a program

Stamp DeviceTime::stamp() {
  poll();
  const uint64_t before = monotonic_ns();
  EventPtr event = record_time(device_);
  if (rests()) tie(event, before);
  return {0, std::move(event), anchor_};
}

// ---------------------------------------------------------------- pauses

void DeviceTime::pause(uint64_t position) {
  poll();
  finish(position);
  if (pending_.empty()) begin(position);
  paused_ = pending_.back().event;
}

void DeviceTime::resume(uint64_t position, bool only_work, bool waiting) {
  EventPtr began = std::exchange(paused_, nullptr);
  const bool frozen = std::exchange(frozen_, false);
  interrupted_ = true;
  if (!frozen || !only_work) return;
  begin(position);
  const EventPtr& ended = pending_.back().event;
  if (waiting) {
    std::lock_guard lock(mutex_);
    lost_.add(std::move(began), ended);
  } else {
    idle_.emplace(std::move(began), ended);
  }
}

uint64_t DeviceTime::take_lost_ns() {
  LostTime taken;
  {
    std::lock_guard lock(mutex_);
    std::swap(taken, lost_);
  }
  return taken.take_ns();
}

}  // namespace sing
