#include "client/families/attention.h"

#include <algorithm>
#include <limits>

#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include "client/log/session.h"
#include "client/ops/calls.h"
#include "client/ops/encode.h"
#include "client/ops/operators.h"
#include "client/ops/plans.h"
#include "client/ops/tensors.h"

namespace sing::client {

namespace {

// Values of SDPBackend in ATen/native/transformers/sdp_utils_cpp.h.
constexpr int64_t kMath = 0;
constexpr int64_t kFlash = 1;
constexpr int64_t kEfficient = 2;
constexpr int64_t kCudnn = 3;
// Above this width, cuDNN has no backward pass.
constexpr int64_t kCudnnTrainedMax = 128;

bool is_trained(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  return c10::GradMode::is_enabled() &&
         (query.requires_grad() || key.requires_grad() || value.requires_grad());
}

// The worker knows its GPU and its libraries: it is queried once for operands of each geometry. In
// a CUDA build torch's own choice would query the driver here.
int64_t ask_worker(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const std::optional<at::Tensor>& mask, double dropout, bool is_causal,
                   std::optional<double> scale, bool enable_gqa) {
  static Operator& op =
      find_operator(c10::Dispatcher::singleton().findSchemaOrThrow("aten::_fused_sdp_choice", ""));
  torch::jit::Stack stack{query, key, value, mask, dropout, is_causal, scale, enable_gqa};
  {
    static thread_local Encoder encoder;
    encoder.call(op, stack);
    const Plan* plan = PlanCache::get().find(encoder.key(), false);
    if (plan != nullptr) return plan->outputs[0].number;
  }
  call(op.handle, kKeys, &stack);
  return stack[0].toInt();
}

int64_t choose(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               const std::optional<at::Tensor>& mask, double dropout, bool is_causal,
               std::optional<double> scale, bool enable_gqa) {
  if (Session::get().software()) return kMath;
  // Nested tensors have no geometry to ask about.
  if (query.is_nested() || key.is_nested() || value.is_nested()) return kMath;
  const int64_t choice = ask_worker(query, key, value, mask, dropout, is_causal, scale, enable_gqa);
  // In the worker no operand requires gradients, so its choice does not consider training.
  const int64_t width = std::max(query.size(-1), value.size(-1));
  if (choice == kCudnn && width > kCudnnTrainedMax && is_trained(query, key, value)) {
    return mask.has_value() && mask->defined() ? kEfficient : kFlash;
  }
  return choice;
}

std::optional<at::Tensor> additive(const std::optional<at::Tensor>& mask, at::ScalarType dtype) {
  if (!mask.has_value() || !mask->defined() || mask->scalar_type() != at::kBool) return mask;
  at::Tensor added = at::zeros_like(*mask, at::TensorOptions().dtype(dtype));
  added.masked_fill_(mask->logical_not(), -std::numeric_limits<double>::infinity());
  return added;
}

}  // namespace

void register_attention_choice() {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose);
}

at::Tensor scaled_dot_product_attention(const at::Tensor& query, const at::Tensor& key,
                                        const at::Tensor& value,
                                        const std::optional<at::Tensor>& mask, double dropout,
                                        bool is_causal, std::optional<double> scale,
                                        bool enable_gqa) {
  if (Session::get().software() && query.dim() == 4 && key.dim() == 4 && value.dim() == 4 &&
      at::native::_fused_sdp_choice_cpp(query, key, value, mask, dropout, is_causal, scale,
                                        enable_gqa) == kFlash) {
    return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout, is_causal, additive(mask, query.scalar_type()), scale));
  }
  return at::native::scaled_dot_product_attention(query, key, value, mask, dropout, is_causal,
                                                  scale, enable_gqa);
}

}  // namespace sing::client
