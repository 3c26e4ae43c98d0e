// The first process in a sandbox: it starts the main process, or has it restored, and waits for it.
#pragma once

#include <csignal>

#include "sandbox/options.h"
#include "sandbox/system.h"

namespace sing::sandbox {

// What is left open in the first process for the main one.
struct Outlets {
  Fd output;
  Fd errors;
};

// Never returns. `socket`: to the launcher. `mask`: signals that are blocked in what is started.
[[noreturn]] void run_inside(const Options& options, Fd socket, Outlets outlets,
                             const sigset_t& mask);

}  // namespace sing::sandbox
