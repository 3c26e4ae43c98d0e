#include "worker/substitutes.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <array>
#include <utility>

namespace sing {

namespace {

using at::Tensor;
using torch::jit::Stack;

Tensor take_tensor(c10::IValue& value) {
  return value.isNone() ? Tensor() : std::move(value).toTensor();
}

// at::dropout on the CPU (ATen/native/Dropout.cpp) divides the noise before it multiplies, and
// so rounds differently from the fused kernel.
void native_dropout(Stack& stack) {
  const Tensor input = stack[0].toTensor();
  const double p = stack[1].toDouble();
  const bool train = stack[2].isNone() || stack[2].toBool();
  stack.clear();
  const auto boolean = input.options().dtype(at::kBool);
  if (!train || p == 0 || input.numel() == 0) {
    stack.emplace_back(input.clone());
    stack.emplace_back(at::ones_like(input, boolean));
  } else if (p == 1) {
    stack.emplace_back(input.mul(at::zeros({}, input.options())));
    stack.emplace_back(at::full_like(input, false, boolean));
  } else {
    Tensor noise = at::empty_like(input).bernoulli_(1 - p).div_(1 - p);
    stack.emplace_back(input * noise);
    stack.emplace_back(noise.ne(0));
  }
}

// The same noise again: what autograd multiplies with on the CPU.
void native_dropout_backward(Stack& stack) {
  const Tensor grad = stack[0].toTensor();
  const Tensor mask = stack[1].toTensor();
  const double scale = stack[2].toDouble();
  stack.clear();
  Tensor noise = mask.to(grad.scalar_type());
  // Nothing passes a dropout of everything, whose scale is 0.
  if (scale != 0) {
    noise.div_(1 / scale);
  } else {
    noise.zero_();
  }
  stack.emplace_back(grad.mul(noise));
}

// Gates as ATen/native/RNN.cpp adds them on the CPU: one linear map with its bias onto the other.
Tensor add_gates(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& input_bias,
                 const Tensor& hidden_bias) {
  Tensor hidden = hidden_bias.defined() ? hidden_gates + hidden_bias : hidden_gates.clone();
  return hidden.add_(input_bias.defined() ? input_gates + input_bias : input_gates);
}

void lstm_cell(Stack& stack) {
  const Tensor input_gates = stack[0].toTensor(), hidden_gates = stack[1].toTensor();
  const Tensor cx = stack[2].toTensor();
  const Tensor input_bias = take_tensor(stack[3]), hidden_bias = take_tensor(stack[4]);
  stack.clear();
  // The workspace for the backward pass: the activated gates, side by side.
  const Tensor workspace =
      add_gates(input_gates, hidden_gates, input_bias, hidden_bias).contiguous();
  const auto gates = workspace.unsafe_chunk(4, 1);
  gates[0].sigmoid_();
  gates[1].sigmoid_();
  gates[2].tanh_();
  gates[3].sigmoid_();
  const Tensor cy = (gates[1] * cx).add_(gates[0] * gates[2]);
  const Tensor hy = gates[3] * cy.tanh();
  stack.emplace_back(hy.contiguous());
  stack.emplace_back(cy.contiguous());
  stack.emplace_back(workspace);
}

void lstm_cell_backward(Stack& stack) {
  const Tensor grad_hy = take_tensor(stack[0]), grad_cy = take_tensor(stack[1]);
  const Tensor cx = stack[2].toTensor(), cy = stack[3].toTensor();
  const Tensor workspace = stack[4].toTensor();
  const bool has_bias = stack[5].toBool();
  stack.clear();
  if (!grad_hy.defined() && !grad_cy.defined()) {
    for (int i = 0; i < 3; ++i) stack.emplace_back(Tensor());
    return;
  }
  const auto gates = workspace.unsafe_chunk(4, 1);
  const Tensor &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  const Tensor tanh_cy = cy.tanh();
  Tensor grad_cell;
  if (grad_hy.defined()) grad_cell = grad_hy * out * (1 - tanh_cy * tanh_cy);
  if (grad_cy.defined()) grad_cell = grad_cell.defined() ? grad_cell + grad_cy : grad_cy;
  const Tensor grad_gates = at::empty_like(workspace, at::MemoryFormat::Contiguous);
  const auto grads = grad_gates.unsafe_chunk(4, 1);
  grads[0].copy_(grad_cell * cell * (1 - in) * in);
  grads[1].copy_(grad_cell * cx * (1 - forget) * forget);
  grads[2].copy_(grad_cell * in * (1 - cell * cell));
  if (grad_hy.defined()) {
    grads[3].copy_(grad_hy * tanh_cy * (1 - out) * out);
  } else {
    grads[3].zero_();
  }
  stack.emplace_back(grad_gates);
  stack.emplace_back((grad_cell * forget).contiguous());
  stack.emplace_back(has_bias ? grad_gates.sum(0, /*keepdim=*/false) : Tensor());
}

void gru_cell(Stack& stack) {
  const Tensor input_gates = stack[0].toTensor(), hidden_gates = stack[1].toTensor();
  const Tensor hx = stack[2].toTensor();
  const Tensor input_bias = take_tensor(stack[3]), hidden_bias = take_tensor(stack[4]);
  stack.clear();
  const Tensor input = input_bias.defined() ? input_gates + input_bias : input_gates;
  const Tensor hidden = hidden_bias.defined() ? hidden_gates + hidden_bias : hidden_gates;
  const auto from_input = input.unsafe_chunk(3, 1);
  const auto from_hidden = hidden.unsafe_chunk(3, 1);
  const Tensor reset = (from_hidden[0] + from_input[0]).sigmoid_();
  const Tensor update = (from_hidden[1] + from_input[1]).sigmoid_();
  const Tensor fresh = (from_input[2] + from_hidden[2] * reset).tanh_();
  stack.emplace_back(((hx - fresh) * update).add_(fresh).contiguous());
  // The workspace for the backward pass, in the order of the CUDA kernel.
  const int64_t width = hx.size(1);
  const Tensor workspace = at::empty({hx.size(0), 5 * width}, hx.options());
  const std::array<Tensor, 5> parts = {reset, update, fresh, hx, from_hidden[2]};
  for (int64_t i = 0; i < 5; ++i) workspace.narrow(1, i * width, width).copy_(parts[i]);
  stack.emplace_back(workspace);
}

void gru_cell_backward(Stack& stack) {
  const Tensor grad_hy = stack[0].toTensor(), workspace = stack[1].toTensor();
  const bool has_bias = stack[2].toBool();
  stack.clear();
  const auto saved = workspace.unsafe_chunk(5, 1);
  const Tensor &reset = saved[0], &update = saved[1], &fresh = saved[2], &hx = saved[3];
  const Tensor& hidden_fresh = saved[4];
  const Tensor grad_update = grad_hy * (hx - fresh) * (1 - update) * update;
  const Tensor grad_fresh = grad_hy * (1 - update) * (1 - fresh * fresh);
  const Tensor grad_reset = grad_fresh * hidden_fresh * (1 - reset) * reset;
  const int64_t width = hx.size(1);
  const auto side_by_side = [&](const Tensor& last) {
    const Tensor gates = at::empty({hx.size(0), 3 * width}, grad_hy.options());
    gates.narrow(1, 0, width).copy_(grad_reset);
    gates.narrow(1, width, width).copy_(grad_update);
    gates.narrow(1, 2 * width, width).copy_(last);
    return gates;
  };
  const Tensor grad_input = side_by_side(grad_fresh);
  const Tensor grad_hidden = side_by_side(grad_fresh * reset);
  stack.emplace_back(grad_input);
  stack.emplace_back(grad_hidden);
  stack.emplace_back((grad_hy * update).contiguous());
  stack.emplace_back(has_bias ? grad_input.sum(0, /*keepdim=*/false) : Tensor());
  stack.emplace_back(has_bias ? grad_hidden.sum(0, /*keepdim=*/false) : Tensor());
}

struct Entry {
  std::string_view name;
  Substitute substitute;
};

constexpr std::array<Entry, 6> kSubstitutes = {{
    {"aten::native_dropout", native_dropout},
    {"aten::native_dropout_backward", native_dropout_backward},
    {"aten::_thnn_fused_lstm_cell", lstm_cell},
    {"aten::_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward},
    {"aten::_thnn_fused_gru_cell", gru_cell},
    {"aten::_thnn_fused_gru_cell_backward", gru_cell_backward},
}};

}  // namespace

Substitute find_substitute(std::string_view full_name) {
  for (const Entry& entry : kSubstitutes) {
    if (entry.name == full_name) return entry.substitute;
  }
  return nullptr;
}

}  // namespace sing
