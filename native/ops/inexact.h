// Operators whose kernels on a GPU may give other bytes when they are executed again.
//
// The list follows torch.use_deterministic_algorithms and the notes of cuDNN: kernels that add with
// atomics, cuDNN's convolutions, and the backward passes of attention. Operators of other libraries
// are not listed: nothing is known of them.
#pragma once

#include <algorithm>
#include <array>
#include <string_view>

namespace sing {

// Without namespace, overload, and the underscore of an operator in place. Sorted.
inline constexpr auto kInexact = std::to_array<std::string_view>({
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward",
    "_ctc_loss_backward",
    "_cudnn_attention_backward",
    "_cudnn_ctc_loss",
    "_efficient_attention_backward",
    "_embedding_bag_backward",
    "_embedding_bag_dense_backward",
    "_embedding_bag_per_sample_weights_backward",
    "_flash_attention_backward",
    "_index_put_impl",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_unsafe_index_put",
    "_upsample_bicubic2d_aa_backward",
    "_upsample_bilinear2d_aa_backward",
    "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d_backward",
    "avg_pool3d_backward",
    "bincount",
    "convolution",
    "convolution_backward",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "cudnn_grid_sampler_backward",
    "cumsum",
    "fractional_max_pool2d_backward",
    "fractional_max_pool3d_backward",
    "grid_sampler_2d_backward",
    "grid_sampler_3d_backward",
    "histc",
    "index_add",
    "index_copy",
    "index_put",
    "index_reduce",
    "kthvalue",
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices_backward",
    "max_unpool2d",
    "max_unpool3d",
    "median",
    "nanmedian",
    "nll_loss2d_forward",
    "put",
    "reflection_pad1d_backward",
    "reflection_pad2d_backward",
    "reflection_pad3d_backward",
    "replication_pad1d_backward",
    "replication_pad2d_backward",
    "replication_pad3d_backward",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "upsample_bicubic2d_backward",
    "upsample_bilinear2d_backward",
    "upsample_linear1d_backward",
    "upsample_trilinear3d_backward",
});
static_assert(std::is_sorted(kInexact.begin(), kInexact.end()));

// `name`: such as "aten::index_add_".
constexpr bool is_listed_inexact(std::string_view name) {
  if (!name.starts_with("aten::")) return false;
  name.remove_prefix(6);
  if (name.ends_with('_')) name.remove_suffix(1);
  return std::binary_search(kInexact.begin(), kInexact.end(), name);
}

}  // namespace sing
