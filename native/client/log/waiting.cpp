#include "client/log/waiting.h"

#include <Python.h>

#include <cxxabi.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

#include "client/log/forks.h"

namespace sing::client {

namespace {

constexpr auto kSignalInterval = std::chrono::milliseconds(50);

// Counts SIGINTs while a thread watches, and forwards them to the previous handler.
class InterruptWatch {
 public:
  static uint32_t begin() {
    std::lock_guard lock(mutex);
    if (watchers++ == 0) {
      struct sigaction ours{};
      ours.sa_sigaction = &handle;
      ours.sa_flags = SA_SIGINFO | SA_RESTART;
      sigemptyset(&ours.sa_mask);
      sigaction(SIGINT, &ours, &before);
    }
    return count.load();
  }
  static void end() {
    std::lock_guard lock(mutex);
    if (--watchers == 0) sigaction(SIGINT, &before, nullptr);
  }
  static uint32_t seen() { return count.load(); }

 private:
  static void handle(int signal, siginfo_t* info, void* context) {
    count.fetch_add(1);
    if (before.sa_flags & SA_SIGINFO) {
      before.sa_sigaction(signal, info, context);
    } else if (before.sa_handler == SIG_DFL) {
      sigaction(SIGINT, &before, nullptr);
      raise(SIGINT);
    } else if (before.sa_handler != SIG_IGN) {
      before.sa_handler(signal);
    }
  }
  inline static std::mutex mutex;
  inline static const HeldAtFork held{mutex};
  inline static int watchers = 0;
  inline static struct sigaction before{};
  inline static std::atomic<uint32_t> count{0};
};

// A daemon thread that wants the GIL while Python finalizes is ended by unwinding its stack, to
// which torch's frames and destructors react with std::terminate. Here it waits for the process's
// end instead, as Python itself does since 3.14.
void take_gil(PyThreadState* state) noexcept {
  try {
    PyEval_RestoreThread(state);
  } catch (abi::__forced_unwind&) {
    for (;;) pause();
  }
}

bool is_main_thread() { return getpid() == static_cast<pid_t>(syscall(SYS_gettid)); }

}  // namespace

Waiting::Waiting()
    : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr),
      on_main_thread_(is_main_thread()),
      checked_(std::chrono::steady_clock::now()) {
  if (!on_main_thread_) interrupts_ = InterruptWatch::begin();
}

Waiting::~Waiting() {
  if (!on_main_thread_) InterruptWatch::end();
  if (state_ != nullptr) take_gil(state_);
}

void Waiting::check_signals(bool now) {
  const auto time = std::chrono::steady_clock::now();
  // The clock may have gone back: the process may have been restored on another boot of the host.
  if (!now && time >= checked_ && time - checked_ < kSignalInterval) return;
  checked_ = time;
  if (on_main_thread_) {
    if (Py_IsInitialized()) run_handlers();
  } else {
    TORCH_CHECK(InterruptWatch::seen() == interrupts_, "interrupted while waiting for the device");
  }
}

void Waiting::run_handlers() {
  PyGILState_STATE ensured{};
  if (state_ != nullptr) {
    PyEval_RestoreThread(state_);
  } else {
    ensured = PyGILState_Ensure();
  }
  const bool raised = PyErr_CheckSignals() != 0;
  python_error error;
  if (raised) error.persist();
  if (state_ != nullptr) {
    state_ = PyEval_SaveThread();
  } else {
    PyGILState_Release(ensured);
  }
  if (raised) throw error;
}

}  // namespace sing::client
