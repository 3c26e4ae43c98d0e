#include "client/log/errors.h"

#include <sstream>

#include <c10/util/Exception.h>

#include "oplog/codec.h"

namespace sing::client {

namespace {

template <class Error>
[[noreturn]] void raise(std::string message) {
  throw Error({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, std::move(message));
}

[[noreturn]] void raise(ErrorKind kind, std::string message) {
  switch (kind) {
    case ErrorKind::out_of_memory:
      raise_out_of_memory(message);
    case ErrorKind::out_of_host_memory:
      raise<c10::OutOfMemoryError>("Out of host memory: " + message);
    case ErrorKind::not_implemented:
      raise<c10::NotImplementedError>(std::move(message));
    case ErrorKind::index:
      raise<c10::IndexError>(std::move(message));
    case ErrorKind::value:
      raise<c10::ValueError>(std::move(message));
    case ErrorKind::type:
      raise<c10::TypeError>(std::move(message));
    case ErrorKind::linear_algebra:
      raise<c10::LinAlgError>(std::move(message));
    case ErrorKind::runtime:
    case ErrorKind::lost_operand:
      break;
  }
  raise<c10::Error>(std::move(message));
}

}  // namespace

std::string as_size(uint64_t bytes) {
  std::ostringstream out;
  out.precision(2);
  out << std::fixed;
  if (bytes < 1024) {
    out << bytes << " bytes";
  } else if (bytes < (1u << 20)) {
    out << static_cast<double>(bytes) / 1024.0 << " KiB";
  } else if (bytes < (1u << 30)) {
    out << static_cast<double>(bytes) / 1048576.0 << " MiB";
  } else {
    out << static_cast<double>(bytes) / 1073741824.0 << " GiB";
  }
  return out.str();
}

void raise_out_of_memory(const std::string& message) {
  raise<c10::OutOfMemoryError>("CUDA out of memory. " + message);
}

void raise_answer(std::span<const std::byte> bytes) {
  Reader in(bytes);
  const auto kind = static_cast<ErrorKind>(in.get<uint8_t>());
  const uint64_t position = in.get<uint64_t>();
  const std::string name(in.get_string());
  std::string message(in.get_string());
  TORCH_CHECK(in.ok(), "the device worker sent an error that cannot be read");
  if (!name.empty()) {
    message += " [" + name + ", position " + std::to_string(position) + " of the device log]";
  }
  raise(kind, std::move(message));
}

}  // namespace sing::client
