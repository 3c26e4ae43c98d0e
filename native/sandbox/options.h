// What sing-sandbox is asked to do.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace sing::sandbox {

enum class Mode { kStart, kRestore, kEnter };

struct Options {
  Mode mode = Mode::kStart;
  // Whether a user namespace is needed to make or to enter the others.
  bool user = false;
  // Whether the user is root in that one, as where processes were saved by earlier versions.
  bool root = false;
  // Where a line is written when the main process runs: its pid, or `! why` if it does not.
  int report = -1;
  // A pipe that is written to by nobody: when it ends, so does the sandbox. -1: when the parent
  // ends.
  int lifeline = -1;
  // Restore: the number of the main process inside, and the one after which others are numbered.
  pid_t main_pid = 0;
  pid_t last_pid = 0;
  // Restore: what the clocks are to show inside, in nanoseconds; -1: what they show outside.
  int64_t monotonic = -1;
  int64_t boottime = -1;
  // Enter: a process in the sandbox.
  pid_t target = 0;
  // Ends with a null.
  char** command = nullptr;
};

// Ends this process, with the usage on stderr, if they make no sense.
Options parse(int count, char** arguments);

}  // namespace sing::sandbox
