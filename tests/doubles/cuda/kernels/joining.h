// Concatenation: the kernels of `at::cat`.
#pragma once

#include <functional>
#include <string>

#include "kernels/kernels.h"

namespace sing_double {

// How to prepare a launch of a concatenation; none if the double does not know it.
Prepare concatenation_named(const std::string& name);

}  // namespace sing_double
