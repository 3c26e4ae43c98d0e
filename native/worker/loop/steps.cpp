#include "worker/loop/steps.h"

#include <algorithm>

namespace sing {

namespace {

// True if the end of the stretch equals what lies one period before it, for enough periods.
bool repeats(const std::vector<uint64_t>& kinds, uint64_t period) {
  const uint64_t compared = period * (Steps::kRepeatsMin - 1);
  uint64_t allowed = compared / Steps::kDifferent;
  for (uint64_t i = kinds.size(); i > kinds.size() - compared; --i) {
    if (kinds[i - 1] != kinds[i - 1 - period] && allowed-- == 0) return false;
  }
  return true;
}

// Returns the shortest distance at which it repeats; 0 if there is none. Candidates are the
// distances at which the last kind of record occurred before; most are dropped at the first
// differences.
uint64_t period_of(const std::vector<uint64_t>& kinds) {
  for (uint64_t period = 1; period <= kinds.size() / Steps::kRepeatsMin; ++period) {
    if (kinds[kinds.size() - 1 - period] == kinds.back() && repeats(kinds, period)) return period;
  }
  return 0;
}

}  // namespace

// Copies the ring while the main thread continues: entries that it may have overwritten by the end
// are dropped.
Steps::Stretch Steps::copy() const {
  Stretch stretch;
  stretch.end = count_.load(std::memory_order_acquire);
  const uint64_t begin = stretch.end - std::min(stretch.end, kRecords);
  for (uint64_t i = begin; i < stretch.end; ++i) {
    const Noted& noted = (*noted_)[i % kRecords];
    stretch.at.push_back(noted.at.load(std::memory_order_relaxed));
    stretch.kinds.push_back(noted.kind.load(std::memory_order_relaxed));
    stretch.memory.push_back(noted.memory.load(std::memory_order_relaxed));
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  const uint64_t now = count_.load(std::memory_order_relaxed) + 1;  // one is being written
  const uint64_t lost = std::min(now - std::min(now, kRecords + begin), stretch.end - begin);
  for (std::vector<uint64_t>* each : {&stretch.at, &stretch.kinds, &stretch.memory}) {
    each->erase(each->begin(), each->begin() + static_cast<ptrdiff_t>(lost));
  }
  return stretch;
}

std::optional<Steps::Found> Steps::find(const Stretch& stretch) {
  const uint64_t period = stretch.kinds.empty() ? 0 : period_of(stretch.kinds);
  if (!period) return std::nullopt;
  const auto last = stretch.memory.end() - static_cast<ptrdiff_t>(period);
  const auto [least, most] = std::minmax_element(last, stretch.memory.end());
  return Found{period, static_cast<uint64_t>(least - last), *least, *most, 0, 0};
}

// Measures whole steps if the remembered ones take long enough, otherwise as many records as
// possible. If the program did other work in between, its records count too: they are its progress.
void Steps::measure(const Stretch& stretch, uint64_t since, Found& found) const {
  const uint64_t last = stretch.end - 1, size = stretch.at.size();
  for (uint64_t back = found.records; back < size && stretch.at[size - 1 - back] >= since;
       back += found.records) {
    found.made = back;
    found.ns = stretch.at.back() - stretch.at[size - 1 - back];
  }
  if (found.ns >= kLongNs) return;
  // Skip the oldest marks: they may be overwritten meanwhile.
  const uint64_t newest = last / kBetweenMarks;
  for (uint64_t mark = newest - std::min(newest, kMarks - 16); mark <= newest; ++mark) {
    const uint64_t at = (*marks_)[mark % kMarks].load(std::memory_order_relaxed);
    if (at < since || at > stretch.at.back()) continue;
    const uint64_t made = last - mark * kBetweenMarks;
    if (made > found.made) found.made = made, found.ns = stretch.at.back() - at;
    return;
  }
}

std::optional<Steps::Found> Steps::find(uint64_t since) const {
  const Stretch stretch = copy();
  auto found = find(stretch);
  if (found) measure(stretch, since, *found);
  return found;
}

bool Steps::aim() {
  const Stretch stretch = copy();
  const auto found = find(stretch);
  if (!found) return false;
  uint64_t due = stretch.end - found->records + found->nadir + 1;
  const uint64_t now = count_.load(std::memory_order_relaxed);
  while (due <= now) due += found->records;
  // If the main thread is beyond that record by now, it stops at once.
  due_.store(due, std::memory_order_relaxed);
  return true;
}

}  // namespace sing
