#include "sandbox/inside.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>

#include <optional>

#include "sandbox/messages.h"

namespace sing::sandbox {
namespace {

constexpr int64_t kSecond = 1'000'000'000;

// The first process of the namespaces: when it returns from here and exits, all processes inside
// end.
class Inside {
 public:
  Inside(const Options& options, Fd socket, const sigset_t& mask)
      : options_(options), socket_(std::move(socket)), mask_(mask) {}

  void run(Outlets outlets) {
    if (!await_launcher() || !set_up(std::move(outlets))) return;
    const bool restores = options_.mode == Mode::kRestore;
    if (restores && !(set_clocks() && set_last_pid())) return;
    const pid_t started = start(!restores);
    if (started < 0) return;
    if (!restores && !announce(started)) return;
    (restores ? restorer_ : main_) = started;
    wait();
  }

 private:
  // Waits until the launcher has written this process's id maps.
  bool await_launcher() {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // if it ended before this, the socket shows it
    char go;
    return retried([&] { return recv(socket_.get(), &go, 1, 0); }) == 1;
  }

  bool set_up(Outlets outlets) {
    // Later mounts of the host appear here; mounts made here stay here.
    if (mount("", "/", nullptr, MS_REC | MS_SLAVE, nullptr) != 0) {
      return fail(failure("mounts cannot be kept apart"));
    }
    if (mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr) != 0) {
      return fail(failure("/proc cannot be mounted"));
    }
    Fd nothing(open("/dev/null", O_RDWR | O_CLOEXEC));
    if (dup2(nothing.get(), 0) < 0 || dup2(outlets.output.get(), 1) < 0 ||
        dup2(outlets.errors.get(), 2) < 0) {
      return fail(failure("standard streams cannot be set"));
    }
    sigset_t children;
    sigemptyset(&children);
    sigaddset(&children, SIGCHLD);
    sigprocmask(SIG_BLOCK, &children, nullptr);
    signals_.reset(signalfd(-1, &children, SFD_CLOEXEC));
    return signals_ ? true : fail(failure("signals cannot be read"));
  }

  // Programs rely on clocks that never go back, and the clocks of another boot may be behind.
  bool set_clocks() {
    if (options_.monotonic < 0) return true;
    if (unshare(CLONE_NEWTIME) != 0) return fail(failure("clocks cannot be kept apart"));
    const auto line = [](const char* name, clockid_t clock, int64_t wanted) {
      timespec now{};
      clock_gettime(clock, &now);
      int64_t offset = wanted - (now.tv_sec * kSecond + now.tv_nsec);
      int64_t seconds = offset / kSecond;
      offset %= kSecond;
      if (offset < 0) {
        offset += kSecond;
        --seconds;
      }
      return std::string(name) + " " + std::to_string(seconds) + " " + std::to_string(offset) +
             "\n";
    };
    const std::string offsets = line("monotonic", CLOCK_MONOTONIC, options_.monotonic) +
                                line("boottime", CLOCK_BOOTTIME, options_.boottime);
    if (!write_file("/proc/self/timens_offsets", offsets)) {
      return fail(failure("clocks cannot be set"));
    }
    return true;
  }

  // The restorer must not have the pid of any process that it restores.
  bool set_last_pid() {
    if (write_file("/proc/sys/kernel/ns_last_pid", std::to_string(options_.last_pid))) return true;
    return fail(failure("numbers of processes cannot be chosen"));
  }

  // Starts the command; -1 on failure.
  pid_t start(bool as_main) {
    const pid_t pid = fork();
    if (pid < 0) fail(failure("no process can be started"));
    if (pid != 0) return pid;
    if (as_main) {
      setsid();  // a session of its own: a terminal's signals do not reach it
    } else if (options_.user && !keep_rights()) {
      fail(failure("rights in the sandbox cannot be kept"));
      _exit(kFailed);
    }
    sigprocmask(SIG_SETMASK, &mask_, nullptr);
    execvp(options_.command[0], options_.command);
    std::fprintf(stderr, "%s: %s\n", options_.command[0], strerror(errno));
    _exit(127);
  }

  bool announce(pid_t pid) {
    Fd process(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
    if (!process) return fail(failure("the process cannot be followed"));
    return send_event(socket_.get(), Event::kRunning, "", process.get());
  }

  // Reaps children until the main process or the launcher ends.
  void wait() {
    pollfd waiting[] = {{signals_.get(), POLLIN, 0}, {socket_.get(), POLLIN, 0}};
    while (!done_) {
      if (poll(waiting, 2, -1) < 0 && errno != EINTR) return;
      if (waiting[1].revents != 0) return;  // the launcher never sends anything: it has ended
      if (waiting[0].revents == 0) continue;
      signalfd_siginfo ignored;
      if (read(signals_.get(), &ignored, sizeof ignored) < 0) continue;
      int status = 0;
      pid_t pid;
      while (!done_ && (pid = waitpid(-1, &status, WNOHANG)) > 0) reaped(pid, status);
    }
  }

  void reaped(pid_t pid, int status) {
    if (pid == main_) {
      done_ = true;
      send_event(socket_.get(), Event::kEnded, std::to_string(status));
    } else if (pid == options_.main_pid && restorer_ > 0) {
      early_ = status;  // before the restorer reported that it was ready
    } else if (pid == restorer_) {
      restorer_ = 0;
      main_ = options_.main_pid;
      if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        done_ = true;
        fail("the restorer failed");
      } else if (early_) {
        done_ = true;
        fail("the restored process ended at once");
      } else if (!announce(main_)) {
        done_ = true;
      }
    }
  }

  bool fail(const std::string& why) {
    send_event(socket_.get(), Event::kFailed, why);
    return false;
  }

  const Options& options_;
  Fd socket_;
  const sigset_t& mask_;
  Fd signals_;
  pid_t main_ = 0;
  pid_t restorer_ = 0;
  std::optional<int> early_;
  bool done_ = false;
};

}  // namespace

void run_inside(const Options& options, Fd socket, Outlets outlets, const sigset_t& mask) {
  Inside(options, std::move(socket), mask).run(std::move(outlets));
  _exit(kFailed);
}

}  // namespace sing::sandbox
