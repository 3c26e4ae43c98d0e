#include "client/refusals.h"

#include <torch/library.h>

namespace sing::client {

namespace {

constexpr char kSparse[] = "sparse";
constexpr char kNested[] = "nested";
constexpr char kQuantized[] = "quantized";

template <const char* kind>
void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(), ": ", kind,
                              " tensors are not supported on a proxied device yet; "
                              "keep them on the CPU.");
}

template <const char* kind>
void refuse_all(c10::DispatchKey key) {
  // Never unregistered: kernels run until the process ends.
  auto* all = new torch::Library(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  auto* aten = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  const auto refusal = [] { return torch::CppFunction::makeFromBoxedFunction<&refuse<kind>>(); };
  all->fallback(refusal());
  // In a CUDA build, torch's own kernels would follow our addresses.
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!name.name.starts_with("aten::") || !op.has_value() || !op->hasKernelForDispatchKey(key)) {
      continue;
    }
    const std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
    aten->impl((name.name + overload).c_str(), refusal());
  }
}

}  // namespace

void register_refusals() {
  refuse_all<kSparse>(c10::DispatchKey::SparseCUDA);
  refuse_all<kSparse>(c10::DispatchKey::SparseCsrCUDA);
  refuse_all<kNested>(c10::DispatchKey::NestedTensorCUDA);
  refuse_all<kQuantized>(c10::DispatchKey::QuantizedCUDA);
}

}  // namespace sing::client
