#include "client/ops/origins.h"

#include <Python.h>

#include <algorithm>
#include <array>
#include <string_view>

#include <c10/util/Exception.h>

namespace sing::client {

namespace {

// Holds the GIL, whether or not this thread held it before.
class Python {
 public:
  Python() : state_(PyGILState_Ensure()) {}
  ~Python() { PyGILState_Release(state_); }
  Python(const Python&) = delete;
  Python& operator=(const Python&) = delete;

 private:
  PyGILState_STATE state_;
};

class Object {
 public:
  explicit Object(PyObject* object) : object_(object) {}
  ~Object() { Py_XDECREF(object_); }
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  PyObject* get() const { return object_; }

 private:
  PyObject* object_;
};

std::string text_of(PyObject* object) {
  const char* text = object != nullptr ? PyUnicode_AsUTF8(object) : nullptr;
  if (text == nullptr) PyErr_Clear();
  return text != nullptr ? text : "";
}

// Returns the Python exception's text, which becomes the operator's error.
std::string take_error() {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  const Object held_type(type), held_value(value), held_traceback(traceback);
  const Object text(value != nullptr ? PyObject_Str(value) : nullptr);
  return text_of(text.get());
}

}  // namespace

bool is_foreign(const std::string& name) {
  static constexpr std::array<std::string_view, 3> ours = {"aten::", "prims::", "sing::"};
  return std::none_of(ours.begin(), ours.end(),
                      [&](std::string_view known) { return name.starts_with(known); });
}

void put_origin(Writer& out, const std::string& name) {
  std::string complaint;
  {
    const Python python;
    const Object module(PyImport_ImportModule("kernelproxy.kernel.activation.op_libraries"));
    const Object found(module.get() != nullptr
                           ? PyObject_CallMethod(module.get(), "origin", "s", name.c_str())
                           : nullptr);
    const char* parts[3] = {};
    if (found.get() != nullptr &&
        PyArg_ParseTuple(found.get(), "sss", &parts[0], &parts[1], &parts[2])) {
      for (const char* part : parts) out.put_string(part);
      return;
    }
    complaint = take_error();
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, name, ": ", complaint);
}

}  // namespace sing::client
