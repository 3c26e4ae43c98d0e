// Runs a program in a sandbox that exists.
#pragma once

#include "sandbox/options.h"

namespace sing::sandbox {

// Returns what to exit with: what the program ended with.
int run_entered(const Options& options);

}  // namespace sing::sandbox
