// The launcher: makes a sandbox, and ends as its main process does.
#pragma once

#include "sandbox/options.h"

namespace sing::sandbox {

// Returns what to exit with.
int run_outside(const Options& options);

}  // namespace sing::sandbox
