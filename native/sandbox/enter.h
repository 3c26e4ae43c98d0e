// Runs a program in an existing sandbox.
#pragma once

#include "sandbox/options.h"

namespace sing::sandbox {

// Returns this process's exit status: that of the program.
int run_entered(const Options& options);

}  // namespace sing::sandbox
