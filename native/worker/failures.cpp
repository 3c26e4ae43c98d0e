#include "worker/failures.h"

#include <c10/util/Exception.h>

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
  // The CPU allocator says it in words only.
  const std::string_view text = error.what_without_backtrace();
  if (text.find("DefaultCPUAllocator: ") != std::string_view::npos) return ErrorKind::out_of_memory;
  return ErrorKind::runtime;
}

}  // namespace

Failure describe_exception(uint64_t position, const std::string& operation) {
  Failure failure{ErrorKind::runtime, position, operation, {}};
  try {
    throw;
  } catch (const LostOperand& error) {
    failure.kind = ErrorKind::lost_operand;
    failure.message = error.what();
  } catch (const c10::Error& error) {
    failure.kind = kind_of(error);
    failure.message = error.what_without_backtrace();
  } catch (const std::bad_alloc&) {
    failure.kind = ErrorKind::out_of_memory;
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
