// Checks write sets: that operators change only what their write sets name. Slow, and done only on
// demand (SING_CHECK_WRITES=1), since snapshots rely on it.
#pragma once

#include <cstddef>
#include <vector>

#include "worker/exec/decode.h"

namespace sing {

class WriteCheck {
 public:
  // Copies the bytes of the operands that `call` must not change.
  WriteCheck(const State& state, const Call& call);
  // Throws c10::Error, naming operator and argument, if their bytes have changed.
  void compare(const State& state, const Operator& op) const;

 private:
  struct Before {
    const Operand* operand;
    std::vector<std::byte> bytes;
  };
  std::vector<Before> before_;
};

}  // namespace sing
