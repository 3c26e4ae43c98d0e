"""The operators of `op_db` that a proxied device refuses, each with the reason."""

from __future__ import annotations

#: By the OpInfo's `formatted_name`. A refusal of any other operator is a failure.
REFUSED: dict[str, str] = {}

#: Operators of NVIDIA's GPUs that software devices have neither a kernel nor a substitute for, as
#: regular expressions of their names behind ``aten::``. Nothing in torch calls them for tensors
#: of a device without cuDNN or without its own attention kernels.
CUDA_ONLY = {
    r"_?cudnn_.*|miopen_.*": "cuDNN's and MIOpen's own; what they do arrives as torch's operators",
    r".*_(cslt|semi_structured)_.*|_to_sparse_semi_structured": "two of four elements are zeros",
    r"_mixed_dtypes_linear|_convert_weight_to_int4pack|_weight_int4pack_mm|_scaled_grouped_mm.*": (
        "products of packed or scaled low-precision matrices"
    ),
    r".*_(flash|efficient|cudnn)_attention.*|_(flash|efficient)_attention_.*": (
        "attention arrives as scaled_dot_product_attention, which chooses what the device has"
    ),
    r"_triton_.*|_fill_mem_eff_dropout_mask_": "parts of attention kernels, for tests of torch",
    r"batch_norm_(stats|elemt|gather_stats.*|backward_reduce|backward_elemt)(\.out)?": (
        "steps of SyncBatchNorm between several GPUs"
    ),
    r"_fused_dropout|_masked_scale": "replaced in torch by native_dropout",
    r"_?conv_depthwise[23]d(\.out)?": "a choice of convolution, which arrives whole",
    r"_philox_.*": "random numbers of a GPU's generator",
    r"_fused_rms_norm_backward": "rms_norm is made of other operators",
}
