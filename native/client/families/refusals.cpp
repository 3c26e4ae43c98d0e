#include "client/families/refusals.h"

#include "client/families/sparse.h"

namespace sing::client {

namespace {

void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(),
                              ": quantized tensors are not supported on a proxied device yet; "
                              "keep them on the CPU.");
}

// Torch's own kernels look for a backend that registered them; without one, as in a CPU build, they
// dereference a null pointer. The other collectives are in kernelproxy/kernel/collectives.
void refuse_any_source(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "recv from any rank is not supported for CUDA tensors, as with NCCL; "
                              "name the rank that sends.");
}

void refuse_sparse_reduction(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "all_reduce of sparse tensors is not supported on a proxied device; "
                              "use to_dense(), or tensors on the CPU.");
}

void refuse_collectives() {
  // Never unregistered: kernels run until the process ends.
  static auto* dense =
      new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  static auto* sparse = new torch::Library(torch::Library::IMPL, "c10d",
                                           c10::DispatchKey::SparseCUDA, __FILE__, __LINE__);
  dense->impl("recv_any_source_", torch::CppFunction::makeFromBoxedFunction<&refuse_any_source>());
  sparse->impl("allreduce_", torch::CppFunction::makeFromBoxedFunction<&refuse_sparse_reduction>());
}

}  // namespace

void register_refusals() {
  refuse_collectives();
  const auto refusal = [] { return torch::CppFunction::makeFromBoxedFunction<&refuse>(); };
  KeyKernels(c10::DispatchKey::QuantizedCUDA)
      .fill(c10::DispatchKey::QuantizedCPU, refusal(),
            [&](std::string_view, bool) { return refusal(); });
}

}  // namespace sing::client
