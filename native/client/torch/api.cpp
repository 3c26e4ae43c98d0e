// C interface of libsing_client, called by kernelproxy/kernel/activation through ctypes.PyDLL.
//
// Functions that return PyObject* follow Python's convention: null with an exception set.
#include <Python.h>

#include <string>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/api/object.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "client/log/session.h"
#include "client/ops/capture.h"
#include "client/ops/copies.h"
#include "client/ops/foreign.h"
#include "client/ops/plans.h"
#include "client/ops/tensors.h"
#include "client/torch/device.h"
#include "client/torch/generators.h"
#include "client/torch/kernels.h"

namespace {

using sing::client::Capture;
using sing::client::Session;

std::string& error_text() {
  static std::string text;
  return text;
}

PyObject* number(uint64_t value) { return PyLong_FromUnsignedLongLong(value); }

bool put(PyObject* dict, const char* name, PyObject* value) {
  const bool done = value != nullptr && PyDict_SetItemString(dict, name, value) == 0;
  Py_XDECREF(value);
  return done;
}

PyObject* dict_of(std::initializer_list<std::pair<const char*, uint64_t>> values) {
  PyObject* dict = PyDict_New();
  if (dict == nullptr) return nullptr;
  for (const auto& [name, value] : values) {
    if (!put(dict, name, number(value))) {
      Py_DECREF(dict);
      return nullptr;
    }
  }
  return dict;
}

constexpr const char* kCapture = "sing.capture";

Capture& capture_of(PyObject* capsule) {
  void* capture = PyCapsule_GetPointer(capsule, kCapture);
  if (capture == nullptr) throw python_error();
  return *static_cast<Capture*>(capture);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

const char* sing_client_error() { return error_text().c_str(); }

// Connects this process to a session. The caller keeps
// ownership of the descriptors, except `bell_fd`, which the session keeps; the caller may replace
// its connection by dup2. Returns 0, or -1 with the text in sing_client_error().
int sing_client_connect(int log_fd, int client_fd, int worker_fd, int agent_fd, int bell_fd) {
  try {
    Session::connect(log_fd, client_fd, worker_fd, agent_fd, bell_fd);
    return 0;
  } catch (const c10::Error& error) {
    error_text() = error.what_without_backtrace();
  } catch (const std::exception& error) {
    error_text() = error.what();
  }
  return -1;
}

// Registers the device with torch, before torch is imported.
void sing_client_register() {
  sing::client::register_device();
  sing::client::register_kernels();
  sing::client::watch_operators();
}

// Sets the function that is called in this process and its forked children when they use the device
// and have no session. It opens one and calls sing_client_connect(), or raises.
PyObject* sing_client_on_first_use(PyObject* opener) {
  HANDLE_TH_ERRORS
  // Never released: it is called until the process ends.
  Py_INCREF(opener);
  Session::on_first_use([opener] {
    PyObject* result = PyObject_CallNoArgs(opener);
    if (result == nullptr) {
      python_error error;
      error.persist();
      throw error;
    }
    Py_DECREF(result);
  });
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Makes autograd run in the threads that call it, also in children: Note [Backward] in calls.cpp.
PyObject* sing_client_keep_autograd_single_threaded() {
  HANDLE_TH_ERRORS
  sing::client::keep_autograd_single_threaded();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Number of devices that programs see.
int sing_client_label_count() { return sing::client::label_count(); }

// Waits until everything was executed; raises a pending error, or KeyboardInterrupt.
PyObject* sing_client_synchronize() {
  HANDLE_TH_ERRORS
  if (Session::connected()) Session::get().synchronize();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* sing_client_memory() {
  HANDLE_TH_ERRORS
  Session& session = Session::get();
  return dict_of({{"used", session.client().memory_used.load()},
                  {"peak", session.client().memory_peak.load()},
                  {"granted", session.agent().memory_granted.load()},
                  {"total", session.agent().memory_total.load()},
                  {"free", session.agent().memory_free.load()},
                  {"allocations", session.counters().allocations},
                  {"frees", session.counters().frees},
                  {"live_peak", session.counters().live_peak},
                  {"bytes_allocated", session.counters().bytes_allocated},
                  {"bytes_freed", session.counters().bytes_freed},
                  {"out_of_memory", session.counters().out_of_memory}});
  END_HANDLE_TH_ERRORS
}

void sing_client_reset_peak() {
  if (Session::connected()) Session::get().reset_peak();
}

void sing_client_limit_memory(uint64_t bytes) {
  if (Session::connected()) Session::get().limit_memory(bytes);
}

// Begins a capture (Note [Captures] in capture.h) and returns it, as a capsule.
PyObject* sing_client_capture_begin() {
  HANDLE_TH_ERRORS
  return PyCapsule_New(Session::get().begin_capture(), kCapture, [](PyObject* capsule) {
    auto* capture = static_cast<Capture*>(PyCapsule_GetPointer(capsule, kCapture));
    if (capture->exists()) Session::get().discard(capture);
  });
  END_HANDLE_TH_ERRORS
}

PyObject* sing_client_capture_end(PyObject* capsule) {
  HANDLE_TH_ERRORS
  Session::get().end_capture(capture_of(capsule));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* sing_client_replay(PyObject* capsule) {
  HANDLE_TH_ERRORS
  Session::get().replay(capture_of(capsule));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

int sing_client_capturing() { return Session::capturing() ? 1 : 0; }

PyObject* sing_client_statistics() {
  HANDLE_TH_ERRORS
  const auto& counters = Session::get().counters();
  const auto& cache = sing::client::PlanCache::get();
  return dict_of({{"operators", counters.operators},
                  {"records", counters.records},
                  {"bytes", counters.bytes},
                  {"requests", counters.requests},
                  {"cache_hits", cache.hits()},
                  {"cache_misses", cache.misses()}});
  END_HANDLE_TH_ERRORS
}

PyObject* sing_client_device() {
  HANDLE_TH_ERRORS
  const auto& agent = Session::get().agent();
  const bool software = Session::get().software();
  PyObject* dict = dict_of({{"total", agent.memory_total.load()},
                            {"threads", agent.threads.load()},
                            {"capability", agent.capability.load()},
                            {"processors", agent.processors.load()}});
  const std::string name(agent.device_name, strnlen(agent.device_name, sizeof(agent.device_name)));
  if (dict != nullptr && put(dict, "kind", PyUnicode_FromString(software ? "software" : "cuda")) &&
      put(dict, "name",
          PyUnicode_FromStringAndSize(name.data(), static_cast<Py_ssize_t>(name.size())))) {
    return dict;
  }
  Py_XDECREF(dict);
  return nullptr;
  END_HANDLE_TH_ERRORS
}

// The device's default generator; valid once torch has been imported.
PyObject* sing_client_default_generator() {
  HANDLE_TH_ERRORS
  return THPGenerator_Wrap(sing::client::default_generator());
  END_HANDLE_TH_ERRORS
}

// Resizes a device storage (a torch.UntypedStorage).
PyObject* sing_client_resize_storage(PyObject* storage, uint64_t bytes) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(THPStorage_Check(storage), "expected a torch.UntypedStorage");
  sing::client::resize_storage(THPStorage_Unpack(storage).unsafeGetStorageImpl(), bytes);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// The number in the log of a device storage (a torch.UntypedStorage).
PyObject* sing_client_storage_number(PyObject* storage) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(THPStorage_Check(storage), "expected a torch.UntypedStorage");
  return number(sing::client::slot_of(THPStorage_Unpack(storage).data_ptr())->id);
  END_HANDLE_TH_ERRORS
}

// Returns the address of a device tensor or storage, which is never readable; None for an object
// that is not on the device.
PyObject* sing_client_address(PyObject* object) {
  HANDLE_TH_ERRORS
  const bool is_tensor = THPVariable_Check(object);
  TORCH_CHECK(is_tensor || THPStorage_Check(object), "expected a tensor or an UntypedStorage");
  const auto* tensor = is_tensor ? THPVariable_Unpack(object).unsafeGetTensorImpl() : nullptr;
  if (is_tensor && !tensor->has_storage()) Py_RETURN_NONE;
  const c10::Storage& storage = is_tensor ? tensor->unsafe_storage() : THPStorage_Unpack(object);
  const c10::DataPtr& data = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  if (!sing::client::is_ours(data)) Py_RETURN_NONE;
  auto address = reinterpret_cast<uint64_t>(data.get());
  if (is_tensor) {
    const auto offset = static_cast<uint64_t>(tensor->storage_offset()) * tensor->itemsize();
    address = tensor->numel() == 0 ? 0 : address + offset;
  }
  return number(address);
  END_HANDLE_TH_ERRORS
}

// Copies between a tensor of the host and one of the device, whose bytes have a name.
// `last`: see copy_named().
PyObject* sing_client_copy_named(PyObject* to, PyObject* from, uint64_t high, uint64_t low,
                                 int last) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(THPVariable_Check(to) && THPVariable_Check(from), "expected two tensors");
  at::Tensor target = THPVariable_Unpack(to);
  const at::Tensor source = THPVariable_Unpack(from);
  {
    const pybind11::gil_scoped_release no_gil;
    sing::client::copy_named(target, source, {high, low}, last != 0);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// The factor of a boxed ReduceOp of kind PREMUL_SUM: a number, or a tensor of one element.
PyObject* sing_client_premultiplier(PyObject* boxed) {
  HANDLE_TH_ERRORS
  const auto object = pybind11::handle(boxed).cast<torch::jit::Object>();
  const auto op = c10::IValue(object._ivalue()).toCustomClass<c10d::ReduceOp>();
  TORCH_CHECK(op->op_ == c10d::ReduceOp::PREMUL_SUM && op->supplement_,
              "the operation has no factor");
  const auto* factor = static_cast<c10d::NCCLPreMulSumSupplement*>(op->supplement_.get());
  if (factor->tensor_factor.defined()) return THPVariable_Wrap(factor->tensor_factor);
  return PyFloat_FromDouble(factor->double_factor);
  END_HANDLE_TH_ERRORS
}

// Position at which the next record will begin.
uint64_t sing_client_position() {
  return Session::connected() ? Session::get().client().head.load() : 0;
}

// To be called when one of torch's settings may have changed.
void sing_client_note_settings() {
  if (Session::connected()) Session::get().note_settings();
}

// A cell begins (+1) or ends (-1).
void sing_client_cell(int running) {
  if (Session::connected()) Session::get().cell(running);
}

// How the program waits for other ranks of its job: see ClientPage::awaiting_peers.
void sing_client_await_peers(int waiting) {
  if (Session::connected()) Session::get().await_peers(static_cast<uint32_t>(waiting));
}

// Marks the daemon as gone; the bell's connection will not be replaced.
void sing_client_give_up() {
  if (Session::connected()) Session::get().give_up();
}

// Detaches from the session's memory once no thread waits for another process; raises if that takes
// longer than `milliseconds`. The caller owns the bell's descriptor again.
PyObject* sing_client_leave(int milliseconds) {
  HANDLE_TH_ERRORS
  Session::get().leave(std::chrono::milliseconds(milliseconds));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Reattaches, with the arguments of sing_client_connect; raises if the session's state differs from
// the one at the detach.
PyObject* sing_client_rejoin(int log_fd, int client_fd, int worker_fd, int agent_fd, int bell_fd) {
  HANDLE_TH_ERRORS
  Session::get().rejoin(log_fd, client_fd, worker_fd, agent_fd, bell_fd);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// To be called when operators of other libraries may have been defined.
PyObject* sing_client_take_over_operators() {
  HANDLE_TH_ERRORS
  sing::client::take_over_operators();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

int sing_client_forked() { return Session::forked() ? 1 : 0; }

}  // extern "C"
#pragma GCC visibility pop
