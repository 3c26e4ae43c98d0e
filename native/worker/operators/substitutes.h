// Operators that exist only for CUDA, computed on a software device.
//
// A notebook that sees a `cuda` device issues CUDA's operators. If the CPU has no kernel for one,
// or one whose bits differ from the CPU's own path, a substitute computes it from ATen operators
// such that the result equals that of the same program on `cpu`.
#pragma once

#include "ops/row.h"

#include <string_view>

namespace sing {

// What the table of operators (ops/table.h) says about one; substitutes.cpp includes the table.
Row row_of(std::string_view full_name);
const Table& table();

}  // namespace sing
