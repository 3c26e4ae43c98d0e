// Graphs of torch.compile, which Python compiles and runs (kernelproxy/worker/graph_*.py).
//
// A Python exception would leave error state in the thread that no code here checks. So the Python
// side raises nothing and returns a complaint; here it becomes an exception.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <string>

#include "oplog/compiled.h"
#include "worker/exec/alone.h"

namespace sing {

namespace {

constexpr std::string_view kNoMemory = "OutOfMemoryError: ";

// Implemented in Python during the worker's start-up.
constexpr char kPythonPrepare[] = "prepare_graph_here(Tensor graph, str digest) -> str";
constexpr char kPythonRun[] =
    "run_graph_here(Tensor graph, str digest, Tensor(a!)[] changed, Tensor[] inputs, int[] numbers)"
    " -> (Tensor[], str)";

void raise(const std::string& complaint) {
  if (complaint.empty()) return;
  TORCH_CHECK_WITH(OutOfMemoryError, !complaint.starts_with(kNoMemory),
                   complaint.substr(std::min(kNoMemory.size(), complaint.size())));
  TORCH_CHECK(false, complaint);
}

// Passes the stack of a call on unchanged: the operator has the same arguments and takes ownership
// of them.
std::string call_python(const char* name, torch::jit::Stack* stack) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  op.callBoxed(stack);
  let_mkl_choose();  // the compiling thread sets torch's number of threads
  std::string complaint = stack->back().toStringRef();
  stack->pop_back();
  return complaint;
}

void prepare(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const at::Tensor graph = torch::jit::peek(*stack, 0, 2).toTensor();
  raise(call_python("sing::prepare_graph_here", stack));
  stack->emplace_back(at::zeros({1}, graph.options()));
}

void run(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  raise(call_python("sing::run_graph_here", stack));
}

}  // namespace

TORCH_LIBRARY(sing, library) {
  for (const char* schema : {kPrepareGraph, kRunGraph, kPythonPrepare, kPythonRun}) {
    library.def(schema);
  }
}

TORCH_LIBRARY_IMPL(sing, CompositeExplicitAutograd, library) {
  library.impl("prepare_graph", torch::CppFunction::makeFromBoxedFunction<&prepare>());
  library.impl("run_graph", torch::CppFunction::makeFromBoxedFunction<&run>());
}

}  // namespace sing
