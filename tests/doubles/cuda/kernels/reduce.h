// Reductions: sums, means, largest and smallest elements.
#pragma once

#include <string>

#include "kernels/kernels.h"

namespace sing_double {

// How to prepare a launch of a reduction; none if the double does not know it.
Prepare reduction_named(const std::string& name);

}  // namespace sing_double
