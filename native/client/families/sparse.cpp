#include "client/families/sparse.h"

#include "client/ops/calls.h"
#include "client/ops/operators.h"

namespace sing::client {

namespace {

torch::CppFunction shipping() { return torch::CppFunction::makeFromBoxedFunction<&call>(); }

template <c10::DispatchKey cpu>
void fill(c10::DispatchKey key, Way Row::* column) {
  KeyKernels(key).fill(cpu, shipping(), [&](std::string_view name, bool generic) {
    return generic && row_of(name).*column != Way::whole
               ? torch::CppFunction::makeFromBoxedFunction<&call_here<cpu>>()
               : shipping();
  });
}

}  // namespace

void register_sparse() {
  fill<c10::DispatchKey::SparseCPU>(c10::DispatchKey::SparseCUDA, &Row::coo);
  fill<c10::DispatchKey::SparseCsrCPU>(c10::DispatchKey::SparseCsrCUDA, &Row::compressed);
}

}  // namespace sing::client
