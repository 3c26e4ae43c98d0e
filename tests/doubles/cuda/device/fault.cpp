#include "device/fault.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <fstream>
#include <sstream>

#include "device/card.h"

namespace sing_double {

int scripted_fault(int card, const std::string& kernel, void** arguments) {
  std::ifstream file(directory() + "/faults");
  std::string line;
  for (int number = 0; number < kFaultsMax && std::getline(file, line); ++number) {
    std::istringstream fields(line);
    int code = 0;
    std::string times, value, name;
    fields >> code >> times >> value >> std::ws;
    std::getline(fields, name);
    if (kernel.find(name) == std::string::npos) continue;
    float found = 0;
    if (value != "*") memcpy(&found, arguments[1], sizeof found);
    if (value != "*" && found != strtof(value.c_str(), nullptr)) continue;
    const uint32_t most = times == "*" ? UINT32_MAX : static_cast<uint32_t>(atoi(times.c_str()));
    if (fire(card, number, most)) return code;
  }
  return 0;
}

}  // namespace sing_double
