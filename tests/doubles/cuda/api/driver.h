// The driver's functions by name, as programs find them without linking to libcuda.
#pragma once

namespace sing_double {

// A function of the driver; one that the double lacks logs its name and returns "not supported".
void* driver_function(const char* name);

}  // namespace sing_double
