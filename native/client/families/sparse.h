// Operators of sparse tensors.
//
// Most of torch's functions for sparse tensors on the CPU and on a GPU are the same ones: they take
// a tensor apart, call operators of its parts, and put a tensor together. They run here, and what
// they call is shipped, or not even that. What has kernels of its own for each device is shipped as
// a whole: its sparse operands travel as their parts, and an answer says what became of them.
#pragma once

#include <string_view>

#include <torch/library.h>

namespace sing::client {

void register_sparse();

// Runs torch's function for the CPU on tensors of the device.
template <c10::DispatchKey key>
void call_here(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(key), stack);
}

// Operators of dense tensors that make sparse or nested ones, by functions that run here.
bool makes_compound(std::string_view name);

// Replaces, or adds, the kernels of a key.
class KeyKernels {
 public:
  explicit KeyKernels(c10::DispatchKey key)
      : key_(key),
        // Never unregistered: kernels run until the process ends.
        all_(new torch::Library(torch::Library::IMPL, "_", key, __FILE__, __LINE__)),
        aten_(new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__)) {}

  // `choose` gives the kernel of each operator that has one for this key or for `cpu`, by name.
  template <class Choose>
  void fill(c10::DispatchKey cpu, torch::CppFunction fallback, Choose choose) {
    all_->fallback(std::move(fallback));
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      const auto op = dispatcher.findSchema(name);
      if (!name.name.starts_with("aten::") || !op.has_value()) continue;
      const bool generic = op->hasKernelForDispatchKey(cpu);
      // In a CUDA build, torch's own kernels would follow our addresses.
      if (!generic && !op->hasKernelForDispatchKey(key_)) continue;
      const std::string full =
          name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      aten_->impl(full.c_str(), choose(std::string_view(full), generic));
    }
  }

 private:
  const c10::DispatchKey key_;
  torch::Library* const all_;
  torch::Library* const aten_;
};

}  // namespace sing::client
