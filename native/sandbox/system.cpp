#include "sandbox/system.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

namespace sing::sandbox {

bool write_file(const char* path, const std::string& text) {
  Fd file(open(path, O_WRONLY | O_CLOEXEC));
  if (!file) return false;
  // In one call: /proc does not accept a partial table.
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

bool keep_rights() {
  if (geteuid() == 0) return true;  // root keeps them anyway
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct rights[_LINUX_CAPABILITY_U32S_3] = {};
  if (syscall(SYS_capget, &header, rights) != 0) return false;
  // With this capability, CRIU would try to become root, which does not exist in the namespace.
  rights[CAP_SETUID / 32].permitted &= ~(1U << CAP_SETUID % 32);
  rights[CAP_SETUID / 32].effective = rights[CAP_SETUID / 32].permitted;
  for (auto& each : rights) each.inheritable = each.permitted;
  if (syscall(SYS_capset, &header, rights) != 0) return false;
  for (unsigned right = 0; right < 32 * _LINUX_CAPABILITY_U32S_3; ++right) {
    if ((rights[right / 32].permitted >> right % 32 & 1) == 0) continue;
    if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, right, 0, 0) != 0) return false;
  }
  return true;
}

}  // namespace sing::sandbox
