#include "worker/exec/failures.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <new>
#include <optional>
#include <utility>

namespace sing {

namespace {

constexpr size_t kMessageBytesMax = 16 << 10;

// Lack of device memory that NVIDIA's libraries, and CUDA when it loads a kernel, report in their
// own way.
bool lacks_memory(std::string_view text) {
  static constexpr std::array<std::string_view, 6> words = {
      "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED",   "CUDNN_STATUS_ALLOC_FAILED",
      "DEVICE_ALLOCATION_FAILED",  "CUSOLVER_STATUS_ALLOC_FAILED", "CUFFT_ALLOC_FAILED",
  };
  return std::any_of(words.begin(), words.end(), [text](std::string_view word) {
    return text.find(word) != std::string_view::npos;
  });
}

ErrorKind kind_of(const c10::Error& error) {
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error)) return ErrorKind::out_of_memory;
  if (dynamic_cast<const c10::IndexError*>(&error)) return ErrorKind::index;
  if (dynamic_cast<const c10::ValueError*>(&error)) return ErrorKind::value;
  if (dynamic_cast<const c10::TypeError*>(&error)) return ErrorKind::type;
  if (dynamic_cast<const c10::NotImplementedError*>(&error)) return ErrorKind::not_implemented;
  if (dynamic_cast<const c10::LinAlgError*>(&error)) return ErrorKind::linear_algebra;
  // The CPU allocator reports it only in the text.
  const std::string_view text = error.what_without_backtrace();
  if (text.find("DefaultCPUAllocator: ") != std::string_view::npos) {
    return ErrorKind::out_of_host_memory;
  }
  if (lacks_memory(text)) return ErrorKind::out_of_memory;
  return ErrorKind::runtime;
}

// If an operator has no kernel, torch lists in fifty lines the backends that have one.
std::string in_one_sentence(std::string text) {
  constexpr std::string_view opening = "Could not run '", before = "from the '";
  if (!text.starts_with(opening)) return text;
  const size_t name = opening.size(), name_end = text.find('\'', name);
  const size_t found = text.find(before, name);
  const size_t backend = found + before.size(), backend_end = text.find('\'', backend);
  if (found == std::string::npos || backend_end == std::string::npos) return text;
  return text.substr(name, name_end - name) + ": torch has no kernel of this operator for the " +
         text.substr(backend, backend_end - backend) +
         " backend, which is what this session's device computes with.";
}

// CUDA errors after which every call of the process fails, by their numbers in the driver's and the
// runtime's interface: cudaErrorIllegalAddress and related errors, the assertion of a kernel,
// uncorrectable memory, and a GPU that was removed.
bool is_lost(int32_t code) {
  static constexpr std::array<int32_t, 15> codes = {46,  214, 220, 226, 700, 702, 709, 710,
                                                    714, 715, 716, 717, 718, 719, 721};
  return std::find(codes.begin(), codes.end(), code) != codes.end();
}

// Torch appends general advice on debugging, in further lines.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

struct Loss {
  std::string words;
  int32_t code;
};

std::optional<Loss> ask(c10::Device device) noexcept {
  try {
    wait_for_device(device);
  } catch (const c10::OutOfMemoryError&) {
  } catch (const c10::AcceleratorError& error) {
    return Loss{error.what_without_backtrace(), error.get_error_code()};
  } catch (const c10::Error& error) {
    return Loss{error.what_without_backtrace(), 0};
  } catch (const std::exception& error) {
    return Loss{error.what(), 0};
  }
  return std::nullopt;
}

// An error that does not come again, as one of an earlier call that had not been read, leaves
// the device in use.
std::optional<Loss> ask_twice(c10::Device device) noexcept {
  if (device.is_cpu()) return std::nullopt;
  std::optional<Loss> loss = ask(device);
  return loss && ask(device) ? std::move(loss) : std::nullopt;
}

}  // namespace

DeviceLost::DeviceLost(const std::string& words, int32_t code, uint64_t position,
                       std::string operation)
    : EndOfRun(first_line(words)),
      code(code),
      position(position),
      operation(std::move(operation)) {}

void wait_for_device(c10::Device device) {
  if (device.is_cpu()) return;
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

void wait_for_operators(c10::Device device) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.synchronizeStream(guard.getDefaultStream(device));
}

void throw_if_lost(c10::Device device, uint64_t position, const std::string& operation) {
  try {
    throw;
  } catch (const EndOfRun&) {
    throw;
  } catch (const c10::AcceleratorError& error) {
    if (is_lost(error.get_error_code())) {
      throw DeviceLost(error.what_without_backtrace(), error.get_error_code(), position, operation);
    }
  } catch (...) {
  }
  if (const auto loss = ask_twice(device)) {
    throw DeviceLost(loss->words, loss->code, position, operation);
  }
}

Failure describe_exception(c10::Device device, uint64_t position, const std::string& operation) {
  throw_if_lost(device, position, operation);
  Failure failure{ErrorKind::runtime, position, operation, {}};
  try {
    throw;
  } catch (const LostOperand& error) {
    failure.kind = ErrorKind::lost_operand;
    failure.message = error.what();
  } catch (const c10::Error& error) {
    failure.kind = kind_of(error);
    failure.message = in_one_sentence(error.what_without_backtrace());
  } catch (const OutOfHostMemory& error) {
    failure.kind = ErrorKind::out_of_host_memory;
    failure.message = error.what();
  } catch (const std::bad_alloc&) {
    failure.kind = ErrorKind::out_of_host_memory;
    failure.message = "the worker could not allocate memory";
  } catch (const std::out_of_range& error) {
    failure.kind = ErrorKind::index;
    failure.message = error.what();
  } catch (const std::exception& error) {
    failure.message = error.what();
  } catch (...) {
    failure.message = "an exception of an unknown type";
  }
  if (failure.message.size() > kMessageBytesMax) failure.message.resize(kMessageBytesMax);
  return failure;
}

bool lacks_device_memory() noexcept {
  try {
    throw;
  } catch (const BeyondGrant&) {
    return false;
  } catch (const c10::Error& error) {
    return kind_of(error) == ErrorKind::out_of_memory;
  } catch (...) {
    return false;
  }
}

}  // namespace sing
