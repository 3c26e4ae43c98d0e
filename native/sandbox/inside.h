// First process in a sandbox: it starts the main process, or lets a restorer restore it, and waits
// for it.
#pragma once

#include <csignal>

#include "sandbox/options.h"
#include "sandbox/system.h"

namespace sing::sandbox {

// Descriptors that stay open in the first process for the main one.
struct Outlets {
  Fd output;
  Fd errors;
};

// Never returns. `socket`: connection to the launcher. `mask`: signal mask of the processes it
// starts.
[[noreturn]] void run_inside(const Options& options, Fd socket, Outlets outlets,
                             const sigset_t& mask);

}  // namespace sing::sandbox
