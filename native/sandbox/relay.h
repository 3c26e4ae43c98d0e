// Forwards the output of the main process.
//
// Its standard streams are pipes of ours rather than the launcher's own. Those may be a terminal or
// a socket, without whose other end a process cannot be saved, and which the restoring launcher
// need not have.
#pragma once

#include <poll.h>

#include "sandbox/system.h"

namespace sing::sandbox {

class Relay {
 public:
  Relay(Fd source, int target) : source_(std::move(source)), target_(target) {}

  // The event to poll for: more to read, or room for what was read.
  pollfd waits_for() const;
  // To be called with the events that poll returned.
  void proceed(short found);
  // Forwards what is already available: waits for room, but not for more input.
  void finish();

 private:
  bool fill();
  void drain();

  Fd source_;
  int target_;
  // A pipe that is ready for writing takes this many bytes without blocking.
  char bytes_[4096];
  size_t begin_ = 0;
  size_t end_ = 0;
};

}  // namespace sing::sandbox
