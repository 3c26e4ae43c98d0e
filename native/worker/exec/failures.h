// Errors in a worker: failures of operators, and logs that no client would write.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
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

// The name of an operation, as lost storages share it.
inline std::shared_ptr<const std::string> shared_name(const std::string& operation) {
  return std::make_shared<const std::string>(operation);
}

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

// Bytes of which it was derived that they are equal are not (SING_CHECK_SPLICING).
class WrongSplice : public EndOfRun {
 public:
  using EndOfRun::EndOfRun;
};

// Saved state that a record needs cannot be read: not a fault of the log.
class LoadFailed : public EndOfRun {
 public:
  using EndOfRun::EndOfRun;
};

// The device rejects all further work of this process, as after a kernel that failed an assertion
// or accessed an illegal address. The next worker continues where this one cannot. The text is one
// line in the device's words.
class DeviceLost : public EndOfRun {
 public:
  DeviceLost(const std::string& words, int32_t code, uint64_t position, std::string operation);

  int32_t code;  // the driver's and the runtime's number of the error; 0: unknown
  // The record during which that was noticed: on a device that works behind the worker, often not
  // the one to blame. The operation is empty if none was being executed.
  uint64_t position;
  std::string operation;
};

// A record that was executed before finds no memory on the device when it is executed again:
// see Note [Memory failures]. Another worker tries again when there is some.
class NoRoom : public EndOfRun {
 public:
  using EndOfRun::EndOfRun;
};

// More device memory than the session was granted. Not a lack of memory on the device.
class BeyondGrant : public c10::OutOfMemoryError {
 public:
  using OutOfMemoryError::OutOfMemoryError;
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

// To be called while an exception is handled: throws DeviceLost if the exception says so, or if the
// device, which is asked, fails as well. Libraries report a lost device in texts of their own, and
// Python's exceptions arrive as texts, so only the device can tell. This waits for its work.
void throw_if_lost(c10::Device device, uint64_t position, const std::string& operation);

// Describes the exception that is being handled, as torch would raise it. Throws DeviceLost like
// throw_if_lost().
Failure describe_exception(c10::Device device, uint64_t position, const std::string& operation);

// True if the exception that is being handled is a lack of memory on the device.
bool lacks_device_memory() noexcept;

// Wait for all that a device was given, or for what operators have given it, not for copies beside
// them; return at once for a software device.
void wait_for_device(c10::Device device);
void wait_for_operators(c10::Device device);

}  // namespace sing
