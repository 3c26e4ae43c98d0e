#include "worker/exec/compound.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_sparse_compressed_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_validate_sparse_coo_tensor_args.h>
#include <ATen/ops/aminmax.h>

namespace sing {

namespace {

using at::Tensor;

void check_within(const Tensor& indices, int64_t least, int64_t most) {
  if (indices.numel() == 0) return;
  const auto [lowest, highest] = at::aminmax(indices);
  TORCH_CHECK(lowest.item<int64_t>() >= least && highest.item<int64_t>() <= most,
              "the indices of a sparse tensor are out of range");
}

// Checks what kernels rely on, and no more: torch, too, accepts unsorted indices.
void check_compressed(const Compound& compound, const Parts& parts) {
  const Tensor &compressed = parts[0], &plain = parts[1], &values = parts[2];
  const c10::IntArrayRef sizes = compound.sizes;
  const bool rows = compound.layout == at::kSparseCsr || compound.layout == at::kSparseBsr;
  const bool blocks = compound.layout == at::kSparseBsr || compound.layout == at::kSparseBsc;
  const int64_t batch = compressed.dim() - 1, block = blocks ? 2 : 0;
  const auto fits = [&](bool good) {
    TORCH_CHECK(good, "the parts of a sparse tensor do not fit each other");
  };
  fits(batch >= 0 && plain.dim() == batch + 1 && values.dim() >= batch + 1 + block);
  const int64_t dense = values.dim() - batch - 1 - block;
  fits(static_cast<int64_t>(sizes.size()) == batch + 2 + dense);
  const auto type = compressed.scalar_type();
  fits((type == at::kInt || type == at::kLong) && plain.scalar_type() == type);
  const auto width = static_cast<size_t>(batch);
  fits(compressed.sizes().slice(0, width) == sizes.slice(0, width) &&
       plain.sizes().slice(0, width) == sizes.slice(0, width) &&
       values.sizes().slice(0, width) == sizes.slice(0, width));
  fits(values.sizes().slice(width + 1 + static_cast<size_t>(block)) == sizes.slice(width + 2));
  const int64_t count = plain.size(batch);
  fits(values.size(batch) == count);
  int64_t extents[2] = {sizes[width], sizes[width + 1]};
  for (int64_t i = 0; blocks && i < 2; ++i) {
    const int64_t length = values.size(batch + 1 + i);
    fits(length > 0 && extents[i] % length == 0);
    extents[i] /= length;
  }
  const int64_t outer = extents[rows ? 0 : 1], inner = extents[rows ? 1 : 0];
  fits(compressed.size(batch) == outer + 1);
  check_within(plain, 0, inner - 1);
  check_within(compressed.select(batch, 0), 0, 0);
  check_within(compressed.select(batch, outer), count, count);
  check_within(compressed.narrow(batch, 1, outer) - compressed.narrow(batch, 0, outer), 0, count);
}

}  // namespace

at::Tensor assemble(const Compound& compound, const Parts& parts) {
  const Tensor& values = parts.back();
  const auto options = values.options().layout(compound.layout);
  if (compound.layout == at::kSparse) {
    TORCH_CHECK(parts[0].scalar_type() == at::kLong && parts[0].dim() == 2 &&
                    parts[0].size(0) == compound.sparse_dimensions,
                "the parts of a sparse tensor do not fit each other");
    at::_validate_sparse_coo_tensor_args(parts[0], values, compound.sizes);
    return at::_sparse_coo_tensor_unsafe(parts[0], values, compound.sizes, options,
                                         compound.coalesced);
  }
  check_compressed(compound, parts);
  return at::_sparse_compressed_tensor_unsafe(parts[0], parts[1], values, compound.sizes, options);
}

}  // namespace sing
