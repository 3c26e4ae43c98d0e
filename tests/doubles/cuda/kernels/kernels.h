// Kernels of the double: recognised by their names, and computed by the host.
#pragma once

#include <functional>
#include <string>

#include "device/stream.h"

namespace sing_double {

// Blocks of a launch.
struct Grid {
  unsigned x = 1, y = 1, z = 1;
};

// How to prepare launches of a kernel. Arguments are copied then.
using Prepare = std::function<Work(void**, const Grid&)>;

// What a launch will do; none if the double does not know the kernel. Arguments are copied now.
Work prepare(const std::string& name, void** arguments, const Grid& grid);

}  // namespace sing_double
