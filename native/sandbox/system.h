// Owned descriptors, and helpers for system calls and small files.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

namespace sing::sandbox {

// The launcher's exit status if it could not do its own part, as with `env` and `nohup`.
constexpr int kFailed = 125;

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset(int fd = -1) {
    if (fd_ >= 0) close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

// Repeats a call that a signal interrupted.
template <class Call>
auto retried(Call call) {
  auto result = call();
  while (result == -1 && errno == EINTR) result = call();
  return result;
}

// Describes the failure, with the text of errno.
inline std::string failure(const char* what) { return std::string(what) + ": " + strerror(errno); }

// Writes a whole small file, such as those of /proc; false on failure.
bool write_file(const char* path, const std::string& text);

// Reads a small file; empty on failure.
std::string read_file(const char* path);

// Lets the next executed program keep this process's capabilities; false on failure. A user other
// than root would lose them, though they are valid only in the sandbox.
bool keep_rights();

}  // namespace sing::sandbox
