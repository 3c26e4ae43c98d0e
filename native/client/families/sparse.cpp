#include "client/families/sparse.h"

#include <unordered_set>

#include "client/ops/calls.h"

namespace sing::client {

namespace {

using Names = std::unordered_set<std::string_view>;

// Operators with separate kernels for each device, or that end in such an operator.
const Names& shipped_coo() {
  static const Names names = {"aten::add.Tensor",
                              "aten::add_.Tensor",
                              "aten::add.out",
                              "aten::sub.Tensor",
                              "aten::sub_.Tensor",
                              "aten::sub.out",
                              "aten::mul.Tensor",
                              "aten::mul_.Tensor",
                              "aten::mul.out",
                              "aten::mm",
                              "aten::mm.out",
                              "aten::bmm",
                              "aten::bmm.out",
                              "aten::addmm",
                              "aten::addmm_",
                              "aten::addmm.out",
                              "aten::sspaddmm.out",
                              "aten::hspmm",
                              "aten::hspmm.out",
                              "aten::index_select",
                              "aten::sparse_mask",
                              "aten::_sparse_mask_projection",
                              "aten::_sparse_sparse_matmul",
                              "aten::_sparse_sum_backward",
                              "aten::_sparse_softmax",
                              "aten::_sparse_softmax_backward_data",
                              "aten::_sparse_log_softmax",
                              "aten::_sparse_log_softmax_backward_data",
                              "aten::_coalesce"};
  return names;
}

const Names& shipped_compressed() {
  static const Names names = {"aten::add.Tensor",
                              "aten::add_.Tensor",
                              "aten::add.out",
                              "aten::mul.Tensor",
                              "aten::mul_.Tensor",
                              "aten::mul.out",
                              "aten::mm",
                              "aten::mm.out",
                              "aten::bmm.out",
                              "aten::addmm",
                              "aten::addmm.out",
                              "aten::addmv.out",
                              "aten::baddbmm.out",
                              "aten::sparse_sampled_addmm",
                              "aten::sparse_sampled_addmm.out",
                              "aten::triangular_solve.X",
                              "aten::sparse_mask",
                              "aten::_sparse_csr_sum.dim_dtype",
                              "aten::_sparse_csr_prod.dim_dtype",
                              "aten::_sparse_mm_reduce_impl",
                              "aten::_sparse_mm_reduce_impl_backward",
                              "aten::_to_sparse_bsr",
                              "aten::_to_sparse_bsc",
                              "aten::_to_sparse_csr",
                              "aten::_to_sparse_csc",
                              "aten::_spsolve"};
  return names;
}

torch::CppFunction shipping() { return torch::CppFunction::makeFromBoxedFunction<&call>(); }

template <c10::DispatchKey cpu>
void fill(c10::DispatchKey key, const Names& shipped) {
  KeyKernels(key).fill(cpu, shipping(), [&](std::string_view name, bool generic) {
    return generic && shipped.count(name) == 0
               ? torch::CppFunction::makeFromBoxedFunction<&call_here<cpu>>()
               : shipping();
  });
}

}  // namespace

bool makes_compound(std::string_view name) {
  static const Names names = {"aten::_to_sparse",
                              "aten::_to_sparse.sparse_dim",
                              "aten::_to_sparse_csr",
                              "aten::_to_sparse_csc",
                              "aten::_to_sparse_bsr",
                              "aten::_to_sparse_bsc",
                              "aten::_embedding_bag_backward",
                              "aten::_nested_from_padded",
                              "aten::_nested_tensor_from_mask",
                              "aten::_nested_tensor_from_mask_left_aligned",
                              "aten::_nested_view_from_buffer",
                              "aten::_nested_compute_contiguous_strides_offsets"};
  return names.count(name) != 0;
}

void register_sparse() {
  fill<c10::DispatchKey::SparseCPU>(c10::DispatchKey::SparseCUDA, shipped_coo());
  fill<c10::DispatchKey::SparseCsrCPU>(c10::DispatchKey::SparseCsrCUDA, shipped_compressed());
}

}  // namespace sing::client
