#include "client/families/norms.h"

#include <array>

#include <ATen/FuncTorchTLS.h>
#include <ATen/ops/group_norm_native.h>
#include <ATen/ops/native_group_norm.h>
#include <ATen/ops/native_group_norm_backward.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "client/log/session.h"

namespace sing::client {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor as_it_lies(const at::Tensor& tensor) {
  return tensor.contiguous(tensor.suggest_memory_format());
}

bool requires_grad(const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }

at::Tensor packed(const at::Tensor& parameter) {
  return parameter.defined() ? parameter.contiguous() : parameter;
}

int64_t elements_of_a_channel(const at::Tensor& input) {
  return c10::multiply_integers(input.sizes().slice(2));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> forward_as_it_lies(const at::Tensor& input,
                                                                  int64_t groups,
                                                                  const at::Tensor& weight,
                                                                  const at::Tensor& bias,
                                                                  double eps) {
  return at::native_group_norm(as_it_lies(input), packed(weight), packed(bias), input.size(0),
                               input.size(1), elements_of_a_channel(input), groups, eps);
}

// Group norm with a formula that keeps the memory layout: torch's own copies the gradient and the
// input of a CUDA tensor first.
class GroupNormAsItLies : public torch::autograd::Function<GroupNormAsItLies> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, int64_t groups,
                            const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& bias, double eps) {
    const at::Tensor scale = weight.value_or(at::Tensor()), shift = bias.value_or(at::Tensor());
    auto [result, mean, reciprocal] = forward_as_it_lies(input, groups, scale, shift, eps);
    context->save_for_backward({input, scale, shift, mean, reciprocal});
    context->saved_data["groups"] = groups;
    context->saved_data["eps"] = eps;
    return result;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1], &bias = saved[2];
    const int64_t groups = context->saved_data["groups"].toInt();
    const std::array<bool, 3> wanted = {input.requires_grad(), requires_grad(weight),
                                        requires_grad(bias)};
    if (!gradients[0].defined()) return variable_list(5);
    if (c10::GradMode::is_enabled()) {
      const double eps = context->saved_data["eps"].toDouble();
      return differentiable(gradients[0], input, weight, bias, groups, eps, wanted);
    }
    auto [of_input, of_weight, of_bias] = at::native_group_norm_backward(
        gradients[0].contiguous(input.suggest_memory_format()), as_it_lies(input), saved[3],
        saved[4], packed(weight), input.size(0), input.size(1), elements_of_a_channel(input),
        groups, wanted);
    return {of_input, at::Tensor(), of_weight, of_bias, at::Tensor()};
  }

 private:
  // If the gradients will be differentiated again, torch's formula for that is used.
  static variable_list differentiable(const at::Tensor& gradient, const at::Tensor& input,
                                      const at::Tensor& weight, const at::Tensor& bias,
                                      int64_t groups, double eps,
                                      const std::array<bool, 3>& wanted) {
    const at::Tensor again = at::native::group_norm(input, groups, weight, bias, eps, true);
    const std::array<at::Tensor, 3> operands = {input, weight, bias};
    variable_list asked;
    for (size_t i = 0; i < operands.size(); ++i) {
      if (wanted[i]) asked.push_back(operands[i]);
    }
    const variable_list found =
        torch::autograd::grad({again}, asked, {gradient}, std::nullopt, true, true);
    std::array<at::Tensor, 3> results;
    for (size_t i = 0, next = 0; i < results.size(); ++i) {
      if (wanted[i]) results[i] = found[next++];
    }
    return {results[0], at::Tensor(), results[1], results[2], at::Tensor()};
  }
};

// True under torch's function transforms, which do not support functions such as the one above.
bool is_transformed() {
  const auto& transforms = at::functorch::functorchTLSAccessor();
  if (!transforms) return false;
  try {
    transforms->checkSupportsCppAutogradFunction();
    return false;
  } catch (const c10::Error&) {
    return true;
  }
}

// Returns false for invalid operands: torch then raises its own error.
bool is_right(const at::Tensor& input, int64_t groups, const at::Tensor& weight,
              const at::Tensor& bias) {
  const auto fits = [&](const at::Tensor& parameter) {
    return !parameter.defined() || (parameter.dim() == 1 && parameter.size(0) == input.size(1));
  };
  return input.dim() >= 2 && groups > 0 && input.size(1) % groups == 0 && fits(weight) &&
         fits(bias);
}

}  // namespace

at::Tensor group_norm(const at::Tensor& input, int64_t groups,
                      const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, double eps, bool cudnn_enabled) {
  const at::Tensor scale = weight.value_or(at::Tensor()), shift = bias.value_or(at::Tensor());
  if (!Session::get().software() || input.suggest_memory_format() == at::MemoryFormat::Contiguous ||
      !is_right(input, groups, scale, shift) || is_transformed()) {
    return at::native::group_norm(input, groups, weight, bias, eps, cudnn_enabled);
  }
  if (c10::GradMode::is_enabled() &&
      (requires_grad(input) || requires_grad(scale) || requires_grad(shift))) {
    return GroupNormAsItLies::apply(input, groups, weight, bias, eps);
  }
  return std::get<0>(forward_as_it_lies(input, groups, scale, shift, eps));
}

}  // namespace sing::client
