// Passes on what the main process writes.
//
// Its standard streams are pipes of ours rather than the launcher's own: those may be a terminal
// or a socket, without whose other end a process cannot be saved, and which the one that restores
// it need not have.
#pragma once

#include <poll.h>

#include "sandbox/system.h"

namespace sing::sandbox {

class Relay {
 public:
  Relay(Fd source, int target) : source_(std::move(source)), target_(target) {}

  // What to wait for: more to read, or room for what was read.
  pollfd waits_for() const;
  // Called with what poll returned for it.
  void proceed(short found);
  // Passes on what is there already, waiting for room but not for more.
  void finish();

 private:
  bool fill();
  void drain();

  Fd source_;
  int target_;
  // Of the size that a pipe which is ready for writing takes without blocking.
  char bytes_[4096];
  size_t begin_ = 0;
  size_t end_ = 0;
};

}  // namespace sing::sandbox
