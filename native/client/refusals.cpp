#include "client/refusals.h"

#include "client/sparse.h"

namespace sing::client {

namespace {

void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(),
                              ": quantized tensors are not supported on a proxied device yet; "
                              "keep them on the CPU.");
}

}  // namespace

void register_refusals() {
  const auto refusal = [] { return torch::CppFunction::makeFromBoxedFunction<&refuse>(); };
  KeyKernels(c10::DispatchKey::QuantizedCUDA)
      .fill(c10::DispatchKey::QuantizedCPU, refusal(),
            [&](std::string_view, bool) { return refusal(); });
}

}  // namespace sing::client
