// Command-line options of sing-sandbox.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace sing::sandbox {

enum class Mode { kStart, kRestore, kEnter };

struct Options {
  Mode mode = Mode::kStart;
  // True if a user namespace is needed to create or enter the others.
  bool user = false;
  // True if the user is root in that namespace, as in sandboxes made by earlier versions.
  bool root = false;
  // Descriptor for one line when the main process runs: its pid, or `! why` if it does not.
  int report = -1;
  // Read end of a pipe to which no process writes: the sandbox ends when its write end is closed.
  // -1: it ends when the parent ends.
  int lifeline = -1;
  // Restore: pid of the main process inside, and the pid after which new processes are numbered.
  pid_t main_pid = 0;
  pid_t last_pid = 0;
  // Restore: values for the clocks inside, in nanoseconds; -1: the same as outside.
  int64_t monotonic = -1;
  int64_t boottime = -1;
  // Enter: pid of a process in the sandbox.
  pid_t target = 0;
  // Null-terminated.
  char** command = nullptr;
};

// Ends this process, with the usage on stderr, if the arguments are invalid.
Options parse(int count, char** arguments);

}  // namespace sing::sandbox
