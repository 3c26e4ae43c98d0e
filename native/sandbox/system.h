// Owned descriptors, and calls that end the process when they fail.
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

// What the launcher ends with when it could not do its own part, as `env` and `nohup` do.
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

// What failed, and why.
inline std::string failure(const char* what) { return std::string(what) + ": " + strerror(errno); }

// Writes a whole small file, such as those of /proc; false if it cannot.
bool write_file(const char* path, const std::string& text);

// Reads a small file; empty if it cannot.
std::string read_file(const char* path);

// Lets a program that is executed next have the rights that this process has; false if it cannot.
// Who is not root would lose them, though they hold in the sandbox only.
bool keep_rights();

}  // namespace sing::sandbox
