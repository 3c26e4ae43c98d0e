#include "sandbox/system.h"

#include <fcntl.h>

namespace sing::sandbox {

bool write_file(const char* path, const std::string& text) {
  Fd file(open(path, O_WRONLY | O_CLOEXEC));
  if (!file) return false;
  // In one call: /proc takes no half of a table.
  return retried([&] { return write(file.get(), text.data(), text.size()); }) ==
         static_cast<ssize_t>(text.size());
}

std::string read_file(const char* path) {
  Fd file(open(path, O_RDONLY | O_CLOEXEC));
  std::string text;
  if (!file) return text;
  char buffer[4096];
  ssize_t count;
  while ((count = retried([&] { return read(file.get(), buffer, sizeof buffer); })) > 0) {
    text.append(buffer, static_cast<size_t>(count));
  }
  return text;
}

}  // namespace sing::sandbox
