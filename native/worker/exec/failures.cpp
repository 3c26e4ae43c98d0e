#include "worker/exec/failures.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <new>

namespace sing {

namespace {

constexpr size_t kMessageBytesMax = 16 << 10;

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
  static constexpr std::array<int32_t, 13> codes = {46,  214, 220, 700, 702, 709, 710,
                                                    714, 715, 716, 717, 718, 719};
  return std::find(codes.begin(), codes.end(), code) != codes.end();
}

}  // namespace

Failure describe_exception(uint64_t position, const std::string& operation) {
  Failure failure{ErrorKind::runtime, position, operation, {}};
  try {
    throw;
  } catch (const LostOperand& error) {
    failure.kind = ErrorKind::lost_operand;
    failure.message = error.what();
  } catch (const c10::AcceleratorError& error) {
    if (is_lost(error.get_error_code())) throw DeviceLost(error.what_without_backtrace());
    failure.message = error.what_without_backtrace();
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

}  // namespace sing
