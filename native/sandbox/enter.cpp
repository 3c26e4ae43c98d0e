#include "sandbox/enter.h"

#include <sched.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <csignal>

#include "sandbox/system.h"

namespace sing::sandbox {
namespace {

bool same_clocks(pid_t target) {
  struct stat ours{};
  struct stat theirs{};
  const std::string path = "/proc/" + std::to_string(target) + "/ns/time";
  return stat("/proc/self/ns/time", &ours) != 0 || stat(path.c_str(), &theirs) != 0 ||
         ours.st_ino == theirs.st_ino;
}

int fail(const char* what) {
  std::fprintf(stderr, "sing-sandbox: %s\n", failure(what).c_str());
  return kFailed;
}

}  // namespace

int run_entered(const Options& options) {
  Fd target(static_cast<int>(syscall(SYS_pidfd_open, options.target, 0)));
  if (!target) return fail("the process is not there");
  const bool shares_clocks = same_clocks(options.target);
  int spaces = CLONE_NEWNS | CLONE_NEWPID | (options.user ? CLONE_NEWUSER : 0);
  if (setns(target.get(), spaces) != 0) return fail("the sandbox cannot be entered");
  // A separate call, and only if needed: entering a time namespace that one is in already needs
  // more privileges than the process may have.
  if (!shares_clocks && setns(target.get(), CLONE_NEWTIME) != 0) {
    return fail("the sandbox's clocks cannot be had");
  }
  const pid_t pid = fork();
  if (pid < 0) return fail("no process can be started");
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // if the caller ends, this process and the program end, too
    if (options.user && !keep_rights()) _exit(fail("rights in the sandbox cannot be kept"));
    execvp(options.command[0], options.command);
    std::fprintf(stderr, "%s: %s\n", options.command[0], strerror(errno));
    _exit(127);
  }
  int status = 0;
  if (retried([&] { return waitpid(pid, &status, 0); }) < 0) return fail("waiting failed");
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace sing::sandbox
