// What goes wrong in a worker: failures of operators, and logs that no client would write.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "oplog/codec.h"

namespace sing {

// An operator (or a transfer) that failed; it reaches the notebook with the next request.
struct Failure {
  ErrorKind kind = ErrorKind::runtime;
  uint64_t position = 0;  // of the record
  std::string operation;  // "aten::add.out"
  std::string message;
};

// What ends the run, where any other exception is the failure of one record.
class EndOfRun : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A record that no client writes: the log cannot be trusted from here on, and the session ends.
class CorruptLog : public EndOfRun {
 public:
  using EndOfRun::EndOfRun;
};

// Saved state that a record needs and that cannot be had: no fault of the log.
class LoadFailed : public EndOfRun {
 public:
  using EndOfRun::EndOfRun;
};

// The device will not do anything for this process any more, as after a kernel that asserted or
// followed a wrong address: the next worker begins where this one cannot go on.
class DeviceLost : public EndOfRun {
 public:
  using EndOfRun::EndOfRun;
};

// Operands that hold no value because the operator that should have made them failed.
class LostOperand : public std::runtime_error {
 public:
  explicit LostOperand(const std::string& cause)
      : std::runtime_error("an operand was never computed: " + cause + " failed") {}
};

// The machine has not the memory for a record, whatever the device has.
class OutOfHostMemory : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Describes the exception that is being handled, as torch would raise it. Throws DeviceLost if it
// says that.
Failure describe_exception(uint64_t position, const std::string& operation);

}  // namespace sing
