// Opening a session at the first use of the device: Note [Opening] in session.h.
#include <Python.h>

#include <utility>

#include <c10/util/Exception.h>

#include "client/log/forks.h"
#include "client/log/session.h"
#include "client/log/waiting.h"
#include "client/torch/generators.h"

namespace sing::client {

namespace {

std::mutex opening;  // held by the thread that opens the session
const FreshAfterFork fresh(opening);
thread_local bool opens = false;
std::function<void()> opener;
bool was_connected = false;  // this process or one that it was forked from
bool joined = false;         // without the opener

// The operators that have numbers, as records; the session of a forked child begins with them.
std::mutex definitions_mutex;
std::vector<std::vector<std::byte>> definitions;

const HeldAtFork held(definitions_mutex);

class Opens {
 public:
  Opens() { opens = true; }
  ~Opens() { opens = false; }
  Opens(const Opens&) = delete;
  Opens& operator=(const Opens&) = delete;
};

class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state_); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  const PyGILState_STATE state_;
};

}  // namespace

void Session::on_first_use(std::function<void()> open) { opener = std::move(open); }

bool Session::opened_here() noexcept { return opener && (generation > 0 || !joined); }

bool Session::forked() noexcept { return generation > 0 && was_connected && !opener; }

void Session::begin_child() noexcept {
  opens = false;
  ++generation;
  // The parent's session is never destroyed; its memory is not mapped here.
  if (Session* const parents = session_.load()) parents->log_file_.close();
  session_.store(nullptr);
  capture_.store(nullptr);
  probing_ = 0;
}

Session& Session::open() {
  TORCH_CHECK(!forked(),
              "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, "
              "you must use the 'spawn' start method");
  TORCH_CHECK(opener, "this process has no device session");
  TORCH_CHECK(!opens, "the device is used while its session is opened");
  const auto lock = lock_without_gil(opening);
  if (!connected()) {
    const Opens here;
    const Gil gil;
    opener();
    TORCH_CHECK(connected(), "no device session was opened");
    tell_default_generator();
  }
  return *session_.load();
}

void Session::connect(int log_fd, int client_fd, int worker_fd, int agent_fd, int bell_fd) {
  TORCH_CHECK(!connected(), "this process has a device session already");
  // Never deleted: tensors are freed during and after the destruction of static objects.
  auto* session = new Session(log_fd, client_fd, worker_fd, agent_fd, bell_fd);
  session->tell_definitions();
  was_connected = true;
  joined = joined || !opens;
  watch_forks(&begin_child);
  session_.store(session);
}

void Session::tell_definitions() {
  for (const auto& definition : definitions) append(RecordKind::define, definition);
}

uint32_t Session::define(const std::string& name, const std::string& overload,
                         std::span<const std::byte> origin) {
  Writer out;
  uint32_t number = 0;
  {
    std::lock_guard lock(definitions_mutex);
    number = static_cast<uint32_t>(definitions.size()) + 1;
    out.put<uint32_t>(number);
    out.put_string(name);
    out.put_string(overload);
    out.put_bytes(origin.data(), origin.size());
    definitions.emplace_back(out.view().begin(), out.view().end());
  }
  append(RecordKind::define, out.view());
  return number;
}

}  // namespace sing::client
