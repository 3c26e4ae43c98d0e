#include "client/torch/kernels.h"

#include <algorithm>
#include <string>

#include <ATen/EmptyTensor.h>
#include <ATen/TracerMode.h>
#include <ATen/core/enum_tag.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "client/families/attention.h"
#include "client/families/graphs.h"
#include "client/families/nested.h"
#include "client/families/norms.h"
#include "client/families/recurrent.h"
#include "client/families/refusals.h"
#include "client/families/sparse.h"
#include "client/ops/calls.h"
#include "client/ops/copies.h"
#include "client/ops/operators.h"
#include "client/ops/tensors.h"
#include "client/ops/unboxed.h"

namespace sing::client {

namespace {

// ------------------------------------------------------------------ storages and views: local

// Under use_deterministic_algorithms, uninitialized memory is filled with a recognizable value.
bool must_fill() {
  const at::Context& torch = at::globalContext();
  return C10_UNLIKELY(torch.deterministicAlgorithms()) &&
         torch.deterministicFillUninitializedMemory();
}

at::Tensor filled(at::Tensor made) {
  if (must_fill()) at::native::fill_empty_deterministic_(made);
  return made;
}

c10::DeviceIndex label_of(const std::optional<at::Device>& device) {
  if (device.has_value()) check_label(device->index());
  return device.has_value() ? device->index() : c10::DeviceIndex{-1};
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<at::Device> device,
                 std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK_NOT_IMPLEMENTED(layout.value_or(at::kStrided) == at::kStrided,
                              "only strided tensors live on a proxied device, not ", *layout);
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  const Labelled made(label_of(device));
  return filled(guarded(
      at::detail::empty_generic(sizes, allocator(), kKeys, c10::dtype_or_default(dtype), format)));
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                         std::optional<at::Device> device, std::optional<bool> pinned) {
  TORCH_CHECK_NOT_IMPLEMENTED(layout.value_or(at::kStrided) == at::kStrided,
                              "only strided tensors live on a proxied device, not ", *layout);
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  const Labelled made(label_of(device));
  return filled(guarded(at::detail::empty_strided_generic(sizes, strides, allocator(), kKeys,
                                                          c10::dtype_or_default(dtype))));
}

void ensure_storage(const at::Tensor& self) {
  auto* storage = self.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  const uint64_t needed = geometry_of(self).storage_bytes();
  if (needed > storage->nbytes()) resize_storage(storage, needed);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes,
                          std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != sizes) {
    const auto before = static_cast<int64_t>(self.storage().nbytes());
    impl->set_sizes_contiguous(sizes);
    ensure_storage(self);
    if (must_fill()) at::native::fill_resize_deterministic_(self, before);
  }
  if (format.has_value() && *format != at::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_storage_at(at::Tensor& self, at::Storage source, int64_t offset,
                           at::IntArrayRef sizes, at::IntArrayRef strides) {
  at::native::checkSetStorage(self, std::move(source), offset, sizes, strides);
  auto* impl = self.unsafeGetTensorImpl();
  if (strides.empty() && !sizes.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides, offset);
  }
  ensure_storage(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const int64_t count = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage_at(self, std::move(source), 0, {count}, {int64_t{1}});
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_storage_at(self, make_storage(Session::get().allocate(0, true)), 0, {0}, {int64_t{1}});
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef sizes) {
  return at::native::view(self, sizes);
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::native::_reshape_alias(self, sizes, strides);
}

// Zeros without memory, as forward-mode autograd makes them; they never reach the device.
class NoBytes final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t) override { return {nullptr, nullptr, &forget, labelled_device()}; }
  c10::DeleterFnPtr raw_deleter() const override { return &forget; }
  void copy_data(void*, const void*, size_t) const override {}

 private:
  static void forget(void*) {}
};

at::Tensor efficient_zeros(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                           std::optional<at::Layout>, std::optional<at::Device> device,
                           std::optional<bool>) {
  static NoBytes none;
  const Labelled made(label_of(device));
  return at::detail::empty_generic(sizes, &none,
                                   kKeys | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor),
                                   c10::dtype_or_default(dtype), std::nullopt);
}

void record_stream(at::Tensor&, at::Stream) {}

bool is_pinned(const at::Tensor&, std::optional<at::Device>) { return false; }

void answer_no(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->emplace_back(false);
}

void refuse_reader(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(),
                              ": this operator works on the CPU only, not on a proxied device.");
}

void call_composite(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  // A key without kernels of its own: the dispatcher then finds the composite kernel.
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::IPU), stack);
}

// Note [Tracing]: torch's tracer stays on below `convolution`, which it does not record, and
// records `_convolution`, of which the composite is made. A trace keeps the result of an unrecorded
// operator as a constant. So during tracing the composite is called, and the operator that it calls
// is again a single convolution.
void convolution(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                 torch::jit::Stack* stack) {
  if (at::tracer::impl::is_dispatch_enabled()) {
    call_composite(op, keys, stack);
  } else {
    call(op, keys, stack);
  }
}

at::Tensor traced_convolution(const at::Tensor& input, const at::Tensor& weight,
                              const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                              c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                              bool transposed, c10::SymIntArrayRef output_padding,
                              c10::SymInt groups, bool, bool, bool, bool) {
  return at::convolution_symint(input, weight, bias, stride, padding, dilation, transposed,
                                output_padding, std::move(groups));
}

// ------------------------------------------------------------------ operators: shipped

// Views change only geometry, which the client holds.
bool is_view(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::inplace_view)) return true;
  const auto& returns = op.schema().returns();
  return std::any_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  });
}

bool is_shipped(const c10::OperatorHandle& op, Way way) {
  if (is_view(op)) return false;
  // A composite next to a kernel (silu_backward) is meant for devices that have no kernel.
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
      !op.hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
    return false;
  }
  const bool composite = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
                         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  return way == Way::whole || (op.hasKernelForDispatchKey(c10::DispatchKey::CPU) && !composite) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CUDA) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
}

void register_by_table(torch::Library& kernels, torch::Library& autograd) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (!name.name.starts_with("aten::")) continue;
    const auto op = dispatcher.findSchema(name);
    const std::string full =
        name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    if (!op.has_value()) continue;
    const Way way = row_of(full).way;
    switch (way) {
      case Way::client:
        break;
      case Way::no:
        kernels.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&answer_no>());
        break;
      case Way::cpu:
        kernels.impl(
            full.c_str(),
            torch::CppFunction::makeFromBoxedFunction<&call_here<c10::DispatchKey::CPU>>());
        break;
      case Way::refused:
        kernels.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&refuse_reader>());
        break;
      case Way::composite:
        for (torch::Library* library : {&kernels, &autograd}) {
          library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&call_composite>());
        }
        break;
      case Way::usual:
      case Way::whole:
        if (is_shipped(*op, way)) kernels.impl(full.c_str(), shipping_kernel(*op));
    }
  }
}

}  // namespace

void register_kernels() {
  // In a CUDA build every kernel here replaces one of torch's, and torch would warn about each.
  class Silence final : public c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silence;
  const c10::WarningUtils::WarningHandlerGuard silent(&silence);

  // Never unregistered: kernels run until the process ends.
  static auto* fallback =
      new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  fallback->fallback(torch::CppFunction::makeFromBoxedFunction<&call>());

  static auto* kernels =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  static auto* autograd = new torch::Library(torch::Library::IMPL, "aten",
                                             c10::DispatchKey::AutogradCUDA, __FILE__, __LINE__);
  register_by_table(*kernels, *autograd);
  kernels->impl("empty.memory_format", &empty);
  kernels->impl("empty_strided", &empty_strided);
  kernels->impl("_efficientzerotensor", &efficient_zeros);
  kernels->impl("view", &view);
  kernels->impl("as_strided", &as_strided);
  kernels->impl("_reshape_alias", &reshape_alias);
  kernels->impl("unfold", &at::native::unfold);
  kernels->impl("view_as_real", &at::native::view_as_real);
  kernels->impl("view_as_complex", &at::native::view_as_complex);
  kernels->impl("copy_", &copy_);
  kernels->impl("_local_scalar_dense", &local_scalar);
  kernels->impl("resize_", &resize_);
  kernels->impl("set_.source_Storage", &set_storage);
  kernels->impl("set_.source_Storage_storage_offset", &set_storage_at);
  kernels->impl("set_.source_Tensor", &at::native::set_tensor_);
  kernels->impl("set_", &set_nothing);
  kernels->impl("is_set_to", &at::native::is_set_to);
  kernels->impl("record_stream", &record_stream);
  kernels->impl("is_pinned", &is_pinned);
  kernels->impl("scaled_dot_product_attention", &scaled_dot_product_attention);
  kernels->impl("group_norm", &group_norm);
  register_recurrent(*kernels);
  kernels->impl("convolution", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  kernels->impl("_convolution", &traced_convolution);

  autograd->impl("scaled_dot_product_attention", &scaled_dot_product_attention);
  autograd->impl("group_norm", &group_norm);
  register_recurrent(*autograd);
  register_attention_choice();
  register_sparse();
  register_nested();
  register_refusals();
  register_graphs();
}

}  // namespace sing::client
