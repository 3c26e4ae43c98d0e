#include "client/families/nested.h"

#include <ATen/NestedTensorImpl.h>
#include <ATen/native/nested/NestedTensorUtils.h>
#include <ATen/ops/_transform_bias_rescale_qkv.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/nested_to_padded_tensor.h>

#include "client/families/sparse.h"
#include "client/ops/operators.h"

namespace sing::client {

namespace {

using at::Tensor;
using at::native::get_nested_tensor_impl;
using at::native::wrap_buffer;

void refuse_nested(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(),
                              " does not take nested tensors of the strided layout on a GPU; try "
                              "torch.jagged, or to_padded_tensor().");
}

// ------------------------------------------------------------------ layer norm
// Torch's function calls a kernel of the device directly instead of the operator.

void check_norm_input(const Tensor& input, at::IntArrayRef shape) {
  const auto* impl = get_nested_tensor_impl(input);
  TORCH_CHECK(at::native::nested_tensor_impl_is_contiguous(impl),
              "layer_norm: nested tensors must be contiguous");
  const Tensor& sizes = impl->get_nested_sizes();
  const auto width = static_cast<int64_t>(shape.size());
  TORCH_CHECK(width > 0 && (sizes.numel() == 0 || width <= sizes.size(1)),
              "layer_norm: normalized_shape has ", width, " dimensions, which are too many");
  for (int64_t row = 0; sizes.numel() != 0 && row < sizes.size(0); ++row) {
    const int64_t* last = sizes.const_data_ptr<int64_t>() + (row + 1) * sizes.size(1) - width;
    TORCH_CHECK(at::IntArrayRef(last, shape.size()) == shape,
                "layer_norm: normalized_shape=", shape, " does not fit the sizes ",
                at::IntArrayRef(last, shape.size()));
  }
}

Tensor rows_of(const Tensor& nested, at::IntArrayRef shape) {
  std::vector<int64_t> sizes{-1};
  sizes.insert(sizes.end(), shape.begin(), shape.end());
  return get_nested_tensor_impl(nested)->get_buffer().reshape(sizes);
}

Tensor nested_like(const Tensor& nested, const Tensor& rows) {
  return rows.defined() ? wrap_buffer(rows.reshape({-1}),
                                      get_nested_tensor_impl(nested)->get_nested_sizes().clone())
                        : rows;
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& input, at::IntArrayRef shape,
                                              const std::optional<Tensor>& weight,
                                              const std::optional<Tensor>& bias, double eps) {
  TORCH_CHECK_VALUE(weight.has_value() && bias.has_value(),
                    "NestedTensor layer_norm requires weight and bias");
  check_norm_input(input, shape);
  auto [rows, mean, rstd] = at::native_layer_norm(rows_of(input, shape), shape, weight, bias, eps);
  return {nested_like(input, rows), mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const Tensor& input,
                                                       at::IntArrayRef shape, const Tensor& mean,
                                                       const Tensor& rstd,
                                                       const std::optional<Tensor>& weight,
                                                       const std::optional<Tensor>& bias,
                                                       std::array<bool, 3> mask) {
  check_norm_input(input, shape);
  check_norm_input(grad, shape);
  auto [rows, of_weight, of_bias] = at::native_layer_norm_backward(
      rows_of(grad, shape), rows_of(input, shape), shape, mean, rstd, weight, bias, mask);
  return {nested_like(input, rows), of_weight, of_bias};
}

// The same for attention's transformation of the projections: torch's function pads, and reads the
// bytes.
std::tuple<Tensor, Tensor, Tensor> transform_projections(const Tensor& projected,
                                                         const Tensor& bias, int64_t heads) {
  return at::_transform_bias_rescale_qkv(at::nested_to_padded_tensor(projected, 0), bias, heads);
}

}  // namespace

void register_nested() {
  constexpr auto cpu = c10::DispatchKey::NestedTensorCPU;
  const auto refusal = [] { return torch::CppFunction::makeFromBoxedFunction<&refuse_nested>(); };
  KeyKernels(c10::DispatchKey::NestedTensorCUDA)
      .fill(cpu, refusal(), [&](std::string_view name, bool generic) {
        if (name == "aten::native_layer_norm") return torch::CppFunction(&layer_norm);
        if (name == "aten::native_layer_norm_backward") {
          return torch::CppFunction(&layer_norm_backward);
        }
        if (name == "aten::_transform_bias_rescale_qkv") {
          return torch::CppFunction(&transform_projections);
        }
        return generic && row_of(name).nested != Way::refused
                   ? torch::CppFunction::makeFromBoxedFunction<&call_here<cpu>>()
                   : refusal();
      });
}

}  // namespace sing::client
