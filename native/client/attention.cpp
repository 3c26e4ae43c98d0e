#include "client/attention.h"

#include <limits>

#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <ATen/ops/zeros_like.h>

#include "client/session.h"

namespace sing::client {

namespace {

// SDPBackend of ATen/native/transformers/sdp_utils_cpp.h.
constexpr int64_t kMath = 0;
constexpr int64_t kFlash = 1;

// In a CUDA build torch's own choice would ask the driver for the GPU's properties.
int64_t choose_math(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                    const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  return kMath;
}

bool is_software() {
  return Session::get().agent().device_kind == static_cast<uint32_t>(DeviceKind::software);
}

std::optional<at::Tensor> additive(const std::optional<at::Tensor>& mask, at::ScalarType dtype) {
  if (!mask.has_value() || !mask->defined() || mask->scalar_type() != at::kBool) return mask;
  at::Tensor added = at::zeros_like(*mask, at::TensorOptions().dtype(dtype));
  added.masked_fill_(mask->logical_not(), -std::numeric_limits<double>::infinity());
  return added;
}

}  // namespace

void register_attention_choice() {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_math);
}

at::Tensor scaled_dot_product_attention(const at::Tensor& query, const at::Tensor& key,
                                        const at::Tensor& value,
                                        const std::optional<at::Tensor>& mask, double dropout,
                                        bool is_causal, std::optional<double> scale,
                                        bool enable_gqa) {
  if (is_software() && query.dim() == 4 && key.dim() == 4 && value.dim() == 4 &&
      at::native::_fused_sdp_choice_cpp(query, key, value, mask, dropout, is_causal, scale,
                                        enable_gqa) == kFlash) {
    return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout, is_causal, additive(mask, query.scalar_type()), scale));
  }
  return at::native::scaled_dot_product_attention(query, key, value, mask, dropout, is_causal,
                                                  scale, enable_gqa);
}

}  // namespace sing::client
