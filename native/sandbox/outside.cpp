#include "sandbox/outside.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <array>
#include <csignal>
#include <optional>

#include "sandbox/inside.h"
#include "sandbox/messages.h"
#include "sandbox/relay.h"

namespace sing::sandbox {
namespace {

// Signals that are forwarded to the main process: the caller takes the launcher for it.
constexpr int kForwarded[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

class Outside {
 public:
  explicit Outside(const Options& options) : options_(options), report_(options.report) {
    fcntl(report_.get(), F_SETFD, FD_CLOEXEC);
    if (options.lifeline >= 0) {
      lifeline_.reset(options.lifeline);
      fcntl(lifeline_.get(), F_SETFD, FD_CLOEXEC);
    } else {
      lifeline_.reset(static_cast<int>(syscall(SYS_pidfd_open, getppid(), 0)));
    }
  }

  int run() {
    if (!lifeline_) return fail(failure("the parent cannot be followed"));
    if (!launch()) return kFailed;
    signal(SIGPIPE, SIG_IGN);
    while (!end_) {
      if (!turn()) break;
    }
    return finish();
  }

 private:
  // Starts the first process in namespaces of its own.
  bool launch() {
    int sockets[2];
    int output[2];
    int errors[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) != 0 ||
        pipe2(output, O_CLOEXEC) != 0 || pipe2(errors, O_CLOEXEC) != 0) {
      return fail(failure("no descriptors are left"));
    }
    socket_.reset(sockets[0]);
    Fd theirs(sockets[1]);
    relays_.emplace(std::array{Relay(Fd(output[0]), 1), Relay(Fd(errors[0]), 2)});
    Outlets outlets{Fd(output[1]), Fd(errors[1])};

    sigset_t ours;
    sigset_t before;
    sigemptyset(&ours);
    sigaddset(&ours, SIGCHLD);
    for (int each : kForwarded) sigaddset(&ours, each);
    sigprocmask(SIG_BLOCK, &ours, &before);

    const unsigned long user = options_.user ? CLONE_NEWUSER : 0;
    first_ = static_cast<pid_t>(
        syscall(SYS_clone, CLONE_NEWPID | CLONE_NEWNS | user | SIGCHLD, 0, 0, 0, 0));
    if (first_ < 0) {
      return fail(failure(options_.user ? "a namespace of users cannot be made"
                                        : "namespaces cannot be made"));
    }
    if (first_ == 0) {
      report_.reset();
      lifeline_.reset();
      socket_.reset();
      relays_.reset();
      run_inside(options_, std::move(theirs), std::move(outlets), before);
    }
    signals_.reset(signalfd(-1, &ours, SFD_CLOEXEC));
    if (!signals_) return fail(failure("signals cannot be read"));
    if (options_.user && !map_ids()) return fail(failure("user namespaces cannot be set up"));
    if (send(socket_.get(), "", 1, MSG_NOSIGNAL) != 1) return fail("it ended before it began");
    return true;
  }

  // Maps only this user's ids: more would need privileges outside.
  bool map_ids() {
    const std::string directory = "/proc/" + std::to_string(first_);
    const auto map = [&](unsigned id) {
      return std::to_string(options_.root ? 0 : id) + " " + std::to_string(id) + " 1\n";
    };
    return write_file((directory + "/setgroups").c_str(), "deny") &&
           write_file((directory + "/gid_map").c_str(), map(getegid())) &&
           write_file((directory + "/uid_map").c_str(), map(geteuid()));
  }

  // Waits for one event; returns false if the sandbox is to end.
  bool turn() {
    pollfd waiting[] = {{socket_.get(), POLLIN, 0},
                        {signals_.get(), POLLIN, 0},
                        {lifeline_.get(), POLLIN, 0},
                        (*relays_)[0].waits_for(),
                        (*relays_)[1].waits_for()};
    if (poll(waiting, std::size(waiting), -1) < 0) return errno == EINTR;
    for (size_t i = 0; i < relays_->size(); ++i) (*relays_)[i].proceed(waiting[3 + i].revents);
    if (waiting[1].revents != 0) forward();
    if (waiting[0].revents != 0) return heard(receive_event(socket_.get()));
    return waiting[2].revents == 0;
  }

  void forward() {
    signalfd_siginfo info{};
    if (read(signals_.get(), &info, sizeof info) != sizeof info) return;
    const int number = static_cast<int>(info.ssi_signo);
    if (number == SIGCHLD) return;  // the socket has the details
    if (main_) {
      syscall(SYS_pidfd_send_signal, main_.get(), number, nullptr, 0);
    } else {
      kill(first_, SIGKILL);  // no main process yet: nothing is lost
    }
  }

  bool heard(Received message) {
    switch (message.event) {
      case Event::kRunning:
        main_ = std::move(message.fd);
        return report_pid();
      case Event::kEnded:
        end_ = std::atoi(message.text.c_str());
        return false;
      case Event::kFailed:
        fail(message.text);
        return false;
      case Event::kNothing:
        break;
    }
    return false;
  }

  // Reads the main process's pid outside from its pidfd: no other interface shows it.
  bool report_pid() {
    const std::string path = "/proc/self/fdinfo/" + std::to_string(main_.get());
    const std::string info = read_file(path.c_str());
    const size_t at = info.find("\nPid:");
    const int pid = at == std::string::npos ? -1 : std::atoi(info.c_str() + at + 5);
    if (pid <= 0) {
      // It has ended meanwhile, and its status will arrive on the socket.
      return pid == -1 && at != std::string::npos ? true : fail("the process cannot be named");
    }
    say(std::to_string(pid) + "\n");
    return true;
  }

  void say(const std::string& line) {
    signal(SIGPIPE, SIG_IGN);
    [[maybe_unused]] const ssize_t count = write(report_.get(), line.data(), line.size());
    report_.reset();  // the reader waits for end-of-file, too
  }

  bool fail(const std::string& why) {
    if (report_) say("! " + why + "\n");
    return false;
  }

  // Ends everything in the sandbox, and returns this process's exit status.
  int finish() {
    kill(first_, SIGKILL);
    retried([&] { return waitpid(first_, nullptr, 0); });
    for (Relay& relay : *relays_) relay.finish();
    if (!end_) return kFailed;
    if (WIFSIGNALED(*end_)) die_by(WTERMSIG(*end_));
    return WEXITSTATUS(*end_);
  }

  static void die_by(int number) {
    const rlimit none{0, 0};
    setrlimit(RLIMIT_CORE, &none);  // no core dump: this process did not crash
    signal(number, SIG_DFL);
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, number);
    sigprocmask(SIG_UNBLOCK, &one, nullptr);
    raise(number);
  }

  const Options& options_;
  Fd report_;
  Fd lifeline_;
  Fd socket_;
  Fd signals_;
  Fd main_;
  pid_t first_ = 0;
  std::optional<int> end_;
  std::optional<std::array<Relay, 2>> relays_;
};

}  // namespace

int run_outside(const Options& options) { return Outside(options).run(); }

}  // namespace sing::sandbox
