// Kernels of torchvision's `nms`.
#pragma once

#include <string>

#include "kernels/kernels.h"

namespace sing_double {

// How to prepare a launch of one of them; none if it is another kernel.
Prepare suppression_named(const std::string& name);

}  // namespace sing_double
