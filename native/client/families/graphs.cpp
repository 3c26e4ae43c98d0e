#include "client/families/graphs.h"

#include <torch/library.h>

#include "oplog/compiled.h"

namespace sing::client {

void register_graphs() {
  // Never unregistered: kernels run until the process ends.
  auto* library =
      new torch::Library(torch::Library::DEF, kGraphLibrary, std::nullopt, __FILE__, __LINE__);
  library->def(kPrepareGraph);
  library->def(kRunGraph);
  // On the device they are records like any others. Autograd needs no part in them: these graphs
  // are what it made of the program, and it already counts the versions of the tensors they change.
  for (const auto key : {c10::DispatchKey::AutogradCUDA, c10::DispatchKey::ADInplaceOrView}) {
    auto* passed = new torch::Library(torch::Library::IMPL, kGraphLibrary, key, __FILE__, __LINE__);
    for (const char* name : {"prepare_graph", "run_graph"}) {
      passed->impl(name, torch::CppFunction::makeFallthrough());
    }
  }
}

}  // namespace sing::client
