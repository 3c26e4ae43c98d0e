// The extension of the double: functions of a Python module, without torch's dispatcher.
#include <ATen/ATen.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

namespace {

struct Addresses {
  void *query, *key, *value, *out;
};

void launch(const Addresses&) {}

at::Tensor forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  for (const at::Tensor& each : {query, key, value}) {
    TORCH_CHECK(each.is_cuda(), "Input tensors must be on CUDA");
    TORCH_CHECK(each.scalar_type() == at::kHalf || each.scalar_type() == at::kBFloat16,
                "FlashAttention only support fp16 and bf16 data type");
    TORCH_CHECK(each.stride(-1) == 1, "Input tensor must have contiguous last dimension");
  }
  const at::Tensor out = at::empty_like(query);
  launch({query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()});
  return out;
}

PyObject* fwd(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *query = nullptr, *key = nullptr, *value = nullptr;
  if (!PyArg_ParseTuple(arguments, "OOO", &query, &key, &value)) return nullptr;
  return THPVariable_Wrap(
      forward(THPVariable_Unpack(query), THPVariable_Unpack(key), THPVariable_Unpack(value)));
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {{"fwd", fwd, METH_VARARGS, nullptr}, {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "flash_attn_2_cuda", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_flash_attn_2_cuda() { return PyModule_Create(&module); }
