// The calls that the sessions of a process have executed last, by their ids.
//
// A table of fixed size, in which a call replaces the oldest of a few others: one cache line each.
// A call that was forgotten is executed again.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "worker/replicas/content.h"

namespace sing {

class RecentCalls {
 public:
  void note(const ContentId& call, uint32_t session) {
    if (lines_.empty()) lines_.resize(kLines);
    Line& line = line_of(call);
    Entry* entry = &line[0];
    for (Entry& each : line) {
      if (each.tag == call.high) {
        entry = &each;
        break;
      }
      // Ages wrap.
      if (static_cast<int32_t>(each.time - entry->time) < 0) entry = &each;
    }
    *entry = {call.high, session, ++time_};
  }
  // Returns the session that has executed it last; 0: unknown.
  uint32_t find(const ContentId& call) const noexcept {
    if (lines_.empty()) return 0;
    for (const Entry& each : line_of(call)) {
      if (each.tag == call.high) return each.session;
    }
    return 0;
  }

 private:
  static constexpr size_t kLines = size_t{1} << 15;
  struct Entry {
    uint64_t tag = 0;
    uint32_t session = 0;
    uint32_t time = 0;
  };
  using Line = std::array<Entry, 4>;

  Line& line_of(const ContentId& call) noexcept { return lines_[call.low % kLines]; }
  const Line& line_of(const ContentId& call) const noexcept { return lines_[call.low % kLines]; }

  std::vector<Line> lines_;
  uint32_t time_ = 0;
};

}  // namespace sing
