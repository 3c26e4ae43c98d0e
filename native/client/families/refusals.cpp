#include "client/families/refusals.h"

#include "client/families/sparse.h"

namespace sing::client {

namespace {

void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(),
                              ": quantized tensors are not supported on a proxied device yet; "
                              "keep them on the CPU.");
}

// Torch's own CUDA kernels look for a backend of collectives that registered them; without one, as
// in a CPU build, they dereference a null pointer.
void refuse_collective(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(),
                              ": collectives of tensors on a proxied device are not supported yet; "
                              "communicate through tensors on the CPU.");
}

void refuse_collectives(c10::DispatchKey key) {
  // Never unregistered: kernels run until the process ends.
  auto* library = new torch::Library(torch::Library::IMPL, "c10d", key, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!name.name.starts_with("c10d::") || !op.has_value()) continue;
    if (!op->hasKernelForDispatchKey(key)) continue;
    library->impl(name.name.c_str(),
                  torch::CppFunction::makeFromBoxedFunction<&refuse_collective>());
  }
}

}  // namespace

void register_refusals() {
  refuse_collectives(c10::DispatchKey::CUDA);
  refuse_collectives(c10::DispatchKey::SparseCUDA);
  const auto refusal = [] { return torch::CppFunction::makeFromBoxedFunction<&refuse>(); };
  KeyKernels(c10::DispatchKey::QuantizedCUDA)
      .fill(c10::DispatchKey::QuantizedCPU, refusal(),
            [&](std::string_view, bool) { return refusal(); });
}

}  // namespace sing::client
