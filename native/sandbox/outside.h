// The launcher: makes a sandbox, and exits with the status of its main process.
#pragma once

#include "sandbox/options.h"

namespace sing::sandbox {

// Returns the exit status.
int run_outside(const Options& options);

}  // namespace sing::sandbox
