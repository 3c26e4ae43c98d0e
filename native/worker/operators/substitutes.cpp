#include "worker/operators/substitutes.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <utility>
#include <vector>

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

// Recomputes the same noise: autograd multiplies with it on the CPU.
void native_dropout_backward(Stack& stack) {
  const Tensor grad = stack[0].toTensor();
  const Tensor mask = stack[1].toTensor();
  const double scale = stack[2].toDouble();
  stack.clear();
  if (!grad.is_floating_point() && !grad.is_complex()) {
    stack.emplace_back(grad * mask * scale);
    return;
  }
  Tensor noise = mask.to(grad.scalar_type());
  // A dropout with probability 1 passes nothing; its scale is 0.
  if (scale != 0) {
    noise.div_(1 / scale);
  } else {
    noise.zero_();
  }
  stack.emplace_back(grad.mul(noise));
}

// GPUs compute the softmax of half precision in single precision, in one kernel (at::softmax, for
// autocast). The CPU's kernels convert nothing, but accept converted operands.
template <Tensor& (*softmax)(const Tensor&, int64_t, bool, Tensor&)>
void softmax_of_half(Stack& stack) {
  const Tensor self = stack[0].toTensor();
  const bool converts = stack[2].toBool();
  Tensor out = stack[3].toTensor();
  softmax(converts ? self.to(at::kFloat) : self, stack[1].toInt(), false, out);
  stack.clear();
  stack.emplace_back(std::move(out));
}

template <Tensor& (*backward)(const Tensor&, const Tensor&, int64_t, at::ScalarType, Tensor&)>
void softmax_of_half_backward(Stack& stack) {
  const Tensor grad = stack[0].toTensor(), output = stack[1].toTensor();
  const at::ScalarType type = stack[3].toScalarType();
  Tensor out = stack[4].toTensor();
  if (type == grad.scalar_type()) {
    backward(grad, output, stack[2].toInt(), type, out);
  } else {
    Tensor wide = at::empty_like(out, grad.options());
    backward(grad, output, stack[2].toInt(), grad.scalar_type(), wide);
    out.copy_(wide);
  }
  stack.clear();
  stack.emplace_back(std::move(out));
}

// Adds gates like ATen/native/RNN.cpp on the CPU: one linear map with its bias onto the other.
Tensor add_gates(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& input_bias,
                 const Tensor& hidden_bias) {
  Tensor hidden = hidden_bias.defined() ? hidden_gates + hidden_bias : hidden_gates.clone();
  return hidden.add_(input_bias.defined() ? input_gates + input_bias : input_gates);
}

// Splits a cell's gates, which lie side by side.
std::vector<Tensor> parts_of(const Tensor& gates, int64_t count) {
  TORCH_CHECK(gates.dim() == 2 && gates.size(1) % count == 0,
              "the gates of a recurrent cell should have (batch, ", count,
              " * hidden) elements, not ", gates.sizes());
  return gates.unsafe_chunk(count, 1);
}

void lstm_cell(Stack& stack) {
  const Tensor input_gates = stack[0].toTensor(), hidden_gates = stack[1].toTensor();
  const Tensor cx = stack[2].toTensor();
  const Tensor input_bias = take_tensor(stack[3]), hidden_bias = take_tensor(stack[4]);
  stack.clear();
  // The workspace for the backward pass: the activated gates, side by side.
  const Tensor workspace =
      add_gates(input_gates, hidden_gates, input_bias, hidden_bias).contiguous();
  const auto gates = parts_of(workspace, 4);
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
  const auto gates = parts_of(workspace, 4);
  const Tensor &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  const Tensor tanh_cy = cy.tanh();
  Tensor grad_cell;
  if (grad_hy.defined()) grad_cell = grad_hy * out * (1 - tanh_cy * tanh_cy);
  if (grad_cy.defined()) grad_cell = grad_cell.defined() ? grad_cell + grad_cy : grad_cy;
  const Tensor grad_gates = at::empty_like(workspace, at::MemoryFormat::Contiguous);
  const auto grads = parts_of(grad_gates, 4);
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
  const auto from_input = parts_of(input, 3);
  const auto from_hidden = parts_of(hidden, 3);
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
  const auto saved = parts_of(workspace, 5);
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

void call_torchs_own(const char* name, Stack& stack) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(stack);
}

// Note [Seeds]. On a GPU, some kernels of attention leave the seeds of their dropout in host memory
// and read them there in the backward pass. A session's tensors are all on its device, so the seeds
// are copied back for that. If nothing was dropped, any seed will do, and there is no need to wait
// for the device. (The seeds of cuDNN's attention are on the device, and must be.)
void bring_seeds_back(Stack& stack, size_t seed, size_t dropout, const char* name) {
  const bool dropped = stack[dropout].toDouble() != 0;
  for (size_t i = seed; i < seed + 2; ++i) {
    const Tensor& tensor = stack[i].toTensor();
    if (!tensor.defined() || tensor.device().is_cpu()) continue;
    stack[i] = dropped ? tensor.cpu() : at::zeros(tensor.sizes(), tensor.scalar_type());
  }
  call_torchs_own(name, stack);
}

void efficient_attention_backward(Stack& stack) {
  bring_seeds_back(stack, 7, 9, "aten::_scaled_dot_product_efficient_attention_backward");
}

// Products of low precision whose results are kept in a higher one.
at::ScalarType wide_type(const c10::IValue& value, const Tensor& factor) {
  const at::ScalarType wide = value.toScalarType(), own = factor.scalar_type();
  TORCH_CHECK(wide == own || (wide == at::kFloat && (own == at::kHalf || own == at::kBFloat16)),
              "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs");
  return wide;
}

void product_in(Stack& stack) {
  const Tensor one = stack[0].toTensor(), other = stack[1].toTensor();
  const at::ScalarType wide = wide_type(stack[2], one);
  stack.clear();
  stack.emplace_back(at::matmul(one.to(wide), other.to(wide)));
}

void product_onto_in(Stack& stack) {
  const Tensor self = stack[0].toTensor(), one = stack[1].toTensor(), other = stack[2].toTensor();
  const at::ScalarType wide = wide_type(stack[3], one);
  const at::Scalar beta = stack[4].toScalar(), alpha = stack[5].toScalar();
  stack.clear();
  const Tensor first = one.to(wide), second = other.to(wide);
  stack.emplace_back(first.dim() == 3 ? at::baddbmm(self.to(wide), first, second, beta, alpha)
                                      : at::addmm(self.to(wide), first, second, beta, alpha));
}

// The same, writing into a tensor that is the last argument.
template <void (*product)(Stack&)>
void into_last(Stack& stack) {
  const Tensor out = stack.back().toTensor();
  stack.pop_back();
  product(stack);
  const Tensor result = stack[0].toTensor();
  if (out.sizes() != result.sizes()) out.resize_(result.sizes());
  out.copy_(result);
  stack[0] = out;
}

// Histogram of integers, for which only CUDA has a kernel. Bins are computed as in CUDA: exactly,
// where a floating-point quotient may be less than the integer that it should be. Differences that
// are too large wrap, as they do there.
void histogram(Stack& stack) {
  const Tensor self = stack[0].toTensor();
  const int64_t bins = stack[1].toInt();
  const at::Scalar min = stack[2].toScalar(), max = stack[3].toScalar();
  stack.clear();
  if (!c10::isIntegralType(self.scalar_type(), /*includeBool=*/false)) {
    stack.emplace_back(at::histc(self, bins, min, max));
    return;
  }
  TORCH_CHECK(bins > 0, "bins must be > 0");
  const auto sum = [](int64_t one, int64_t other) {
    return static_cast<int64_t>(static_cast<uint64_t>(one) + static_cast<uint64_t>(other));
  };
  const Tensor values = self.to(at::kLong).flatten();
  int64_t low = min.to<int64_t>(), high = max.to<int64_t>();
  if (low == high && values.numel() != 0) {
    low = values.min().item<int64_t>();
    high = values.max().item<int64_t>();
  }
  if (low == high) {
    low = sum(low, -1);
    high = sum(high, 1);
  }
  TORCH_CHECK(low < high, "max must be larger than min");
  const Tensor inside = values.masked_select(values.ge(low).logical_and_(values.le(high)));
  const int64_t width =
      static_cast<int64_t>(static_cast<uint64_t>(high) - static_cast<uint64_t>(low));
  const Tensor places = inside.sub(low).mul_(bins).div_(width, "trunc").clamp_max_(bins - 1);
  stack.emplace_back(at::bincount(places, {}, bins).to(self.scalar_type()));
}

// The CPU's kernel records which elements it chose, for the backward pass, if an operand requires a
// gradient; here none does.
void sparse_reduction(Stack& stack) {
  stack[0].toTensor().unsafeGetTensorImpl()->set_requires_grad(c10::GradMode::is_enabled());
  call_torchs_own("aten::_sparse_mm_reduce_impl", stack);
}

// The kernel follows these recorded indices unchecked.
void sparse_reduction_backward(Stack& stack) {
  const auto reduction = stack[3].toStringView();
  if (reduction == "amax" || reduction == "amin") {
    const Tensor &self = stack[0].toTensor(), &grad = stack[1].toTensor();
    const Tensor& chosen = stack[4].toTensor();
    TORCH_CHECK(chosen.defined() && chosen.sizes() == grad.sizes() && chosen.is_contiguous() &&
                    !chosen.lt(0).any().item<bool>() && !chosen.gt(self._nnz()).any().item<bool>(),
                "the backward pass of a sparse reduction needs what the forward pass chose");
  }
  call_torchs_own("aten::_sparse_mm_reduce_impl_backward", stack);
}

}  // namespace

}  // namespace sing

// The rows of the operators: one for each substitute.
#define ON_CLIENT(function) nullptr
#define ON_WORKER(function) &sing::function
#include "ops/table.h"

namespace sing {

const Table& table() {
  static const Table all(kRows);
  return all;
}

Row row_of(std::string_view full_name) { return table().find(full_name); }

}  // namespace sing
