#include "client/waiting.h"

#include <Python.h>

#include <torch/csrc/Exceptions.h>

namespace sing::client {

namespace {
constexpr auto kSignalInterval = std::chrono::milliseconds(50);
}

Waiting::Waiting()
    : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr),
      checked_(std::chrono::steady_clock::now()) {}

Waiting::~Waiting() {
  if (state_ != nullptr) PyEval_RestoreThread(state_);
}

void Waiting::check_signals(bool now) {
  const auto time = std::chrono::steady_clock::now();
  if (!now && time - checked_ < kSignalInterval) return;
  checked_ = time;
  if (!Py_IsInitialized()) return;
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
