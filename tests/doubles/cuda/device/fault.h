// Scripted faults: a line of the file `faults` for each.
//
// `CODE TIMES VALUE NAME`: a launch of a kernel whose name contains NAME, and whose second argument
// begins with the float VALUE (`*`: any), ends with CODE, TIMES times in all processes (`*`:
// always).
#pragma once

#include <string>

namespace sing_double {

// The code with which a launch is to end; 0 if it is to be executed.
int scripted_fault(int card, const std::string& kernel, void** arguments);

}  // namespace sing_double
