// Errors in a worker: failures of operators, and logs that no client would write.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "oplog/codec.h"

namespace sing {

// Failure of an operator (or a transfer); it reaches the notebook with the next request.
struct Failure {
  ErrorKind kind = ErrorKind::runtime;
  uint64_t position = 0;  // of the record
  std::string operation;  // "aten::add.out"
  std::string message;
};

// An error that ends the run. Any other exception is the failure of one record.
class EndOfRun : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A record that no client writes: the log cannot be trusted from here on, and the session ends.
class CorruptLog : public EndOfRun {
 public:
  using EndOfRun::EndOfRun;
};

// Saved state that a record needs cannot be read: not a fault of the log.
class LoadFailed : public EndOfRun {
 public:
  using EndOfRun::EndOfRun;
};

// The device rejects all further work of this process, as after a kernel that failed an assertion
// or accessed an illegal address. The next worker continues where this one cannot.
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

// The host, not the device, lacks memory for a record.
class OutOfHostMemory : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Describes the exception that is being handled, as torch would raise it. Throws DeviceLost if the
// exception means that.
Failure describe_exception(uint64_t position, const std::string& operation);

}  // namespace sing
