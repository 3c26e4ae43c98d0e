// Operators of sparse tensors.
//
// Most of torch's functions for sparse tensors are the same on the CPU and on a GPU: they take a
// tensor apart, call operators on its parts, and assemble the result. They run in the client; the
// operators that they call are sent to the worker, if there are any. An operator with separate
// kernels for each device is sent as a whole: its sparse operands are sent as their parts, and an
// answer describes the results.
#pragma once

#include <string_view>

#include <torch/library.h>

namespace sing::client {

void register_sparse();

// Runs torch's CPU function on tensors of the device.
template <c10::DispatchKey key>
void call_here(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(key), stack);
}

// Replaces, or adds, the kernels of a key.
class KeyKernels {
 public:
  explicit KeyKernels(c10::DispatchKey key)
      : key_(key),
        // Never unregistered: kernels run until the process ends.
        all_(new torch::Library(torch::Library::IMPL, "_", key, __FILE__, __LINE__)),
        aten_(new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__)) {}

  // `choose` returns, by name, the kernel of each operator that has one for this key or for `cpu`.
  template <class Choose>
  void fill(c10::DispatchKey cpu, torch::CppFunction fallback, Choose choose) {
    all_->fallback(std::move(fallback));
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      const auto op = dispatcher.findSchema(name);
      if (!name.name.starts_with("aten::") || !op.has_value()) continue;
      const bool generic = op->hasKernelForDispatchKey(cpu);
      // In a CUDA build, torch's own kernels would access our addresses.
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
