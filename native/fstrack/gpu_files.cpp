#include "fstrack/gpu_files.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "fstrack/journal.h"

namespace sing::fstrack {

namespace {

// Only shows what workers do: it makes no context and computes nothing.
constexpr char kAllowed[] = "/nvidia-smi";
constexpr char kText[] =
    "jupyter_sing: this program finds no GPU, because only its notebook's session uses it. Start "
    "the program with `jupyter sing run`, which gives it a session of its own, or set "
    "JUPYTER_SING_DIRECT_GPU=1 before the kernel starts.\n";

constinit char prefixes[512] = {};
// False in the process that has the session, where jupyter_sing says more when a library is
// imported. Its children inherit the variable that it sets.
constinit bool tells = false;
constinit std::atomic<bool> was_told = false;

// Not by getenv, which some shells replace by a function of their own.
const char* variable(const char* name) {
  const size_t length = std::strlen(name);
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    if (std::strncmp(*entry, name, length) == 0 && (*entry)[length] == '=') {
      return *entry + length + 1;
    }
  }
  return nullptr;
}

bool exists(const char* path) {
  const KeepErrno keep;
  return syscall(SYS_faccessat, AT_FDCWD, path, F_OK) == 0;
}

bool is_allowed_program() {
  char path[512];
  const long length = syscall(SYS_readlinkat, AT_FDCWD, "/proc/self/exe", path, sizeof path);
  constexpr long kLength = sizeof kAllowed - 1;
  return length >= kLength && std::memcmp(path + length - kLength, kAllowed, kLength) == 0;
}

void tell() {
  if (!tells || was_told.exchange(true, std::memory_order_relaxed)) return;
  (void)syscall(SYS_write, STDERR_FILENO, kText, sizeof kText - 1);
}

}  // namespace

void read_gpu_files() {
  const char* text = variable("SING_GPU_FILES");
  if (text == nullptr || std::strlen(text) >= sizeof prefixes || is_allowed_program()) return;
  std::strcpy(prefixes, text);
  tells = variable("SING_CLIENT") != nullptr;
}

bool is_denied(const char* path) {
  if (prefixes[0] == '\0' || path == nullptr) return false;
  const char* prefix = prefixes;
  while (*prefix != '\0') {
    const size_t length = std::strcspn(prefix, ":");
    if (length != 0 && std::strncmp(path, prefix, length) == 0) {
      if (!exists(path)) return false;
      tell();
      errno = EACCES;  // as for a user without access: CUDA then reports that there is no device
      return true;
    }
    prefix += length + (prefix[length] == ':');
  }
  return false;
}

}  // namespace sing::fstrack
