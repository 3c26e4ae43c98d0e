// Replaces torch's kernels for CUDA when this library is loaded, which the double does with a
// process's first context.
#include <ATen/Context.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "operators/on_host.h"

namespace sing_double {
namespace {

using c10::OperatorHandle;
using torch::jit::Stack;

// Operators that launch no kernel, or ask the card.
constexpr std::array kOwn = {"aten::empty",
                             "aten::empty_strided",
                             "aten::_local_scalar_dense",
                             "aten::set_",
                             "aten::resize_",
                             "aten::record_stream",
                             "aten::is_set_to",
                             "aten::_reshape_alias",
                             "aten::_fused_sdp_choice",
                             "aten::_pin_memory",
                             "aten::_cudnn_init_dropout_state"};
// Attention is composed of other operators: its own kernels are CUDA's alone.
int64_t composed_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                           const std::optional<at::Tensor>&, double, bool, std::optional<double>,
                           bool) {
  return 0;
}

// Operators whose kernels the double knows, unless numbers are complex.
constexpr std::array kKnown = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::cat"};
// Operators without a kernel of their own for CUDA, but for libraries that the double lacks.
constexpr std::array kComposed = {"aten::convolution", "aten::convolution_backward"};

template <size_t count>
bool contains(const std::array<const char*, count>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool is_complex(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().is_complex();
}

// The kernel of CUDA, which the double knows, for all numbers that are not complex.
class Known : public c10::OperatorKernel {
 public:
  explicit Known(c10::SafeKernelFunction kernel) : kernel_(std::move(kernel)) {}

  void operator()(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const size_t count = op.schema().arguments().size();
    if (std::any_of(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end(), is_complex)) {
      on_host(op, keys, stack);
    } else {
      kernel_.callBoxed(op, keys, stack);
    }
  }

 private:
  c10::SafeKernelFunction kernel_;
};

bool has_tensors(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    if (argument.type()->str().find("Tensor") != std::string::npos) return true;
  }
  return false;
}

// Views, which read and write nothing.
bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  }
  return false;
}

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Kernels of CUDA are replaced on purpose, and without libraries there is one way for each.
torch::Library* replaced() {
  auto& context = at::globalContext();
  context.setUserEnabledCuDNN(false);
  context.setSDPUseFlash(false);
  context.setSDPUseMemEfficient(false);
  context.setSDPUseCuDNN(false);
  Silent silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  auto& dispatcher = c10::Dispatcher::singleton();
  auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  std::vector<c10::OperatorName> names =
      dispatcher.getAllOpNamesForDispatchKey(c10::DispatchKey::CUDA);
  for (const char* name : kComposed) names.push_back({name, ""});
  for (const c10::OperatorName& name : names) {
    const auto op = dispatcher.findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0 || contains(kOwn, name.name)) continue;
    if (!has_tensors(op->schema()) || is_view(op->schema())) continue;
    if (!op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    const std::string own = c10::toString(name).substr(6);
    if (contains(kKnown, name.name)) {
      auto kernel = op->getComputedKernelForDispatchKey(c10::DispatchKey::CUDA);
      library->impl(own.c_str(), torch::CppFunction::makeFromBoxedFunctor(
                                     std::make_unique<Known>(std::move(kernel))));
    } else {
      library->impl(own.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_host>());
    }
  }
  library->impl("_fused_sdp_choice", composed_attention);
  return library;
}

torch::Library* const library = replaced();

}  // namespace
}  // namespace sing_double
