// Sparse tensors in records and answers: a few numbers, and parts that are ordinary tensors.
//
// The parts of a COO tensor are its indices and its values; the parts of a compressed tensor (CSR,
// CSC, BSR, BSC) are its compressed indices, its plain indices and its values.
#pragma once

#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/SparseTensorImpl.h>
#include <c10/core/Layout.h>

#include "oplog/geometry.h"

namespace sing {

inline constexpr size_t kPartsMax = 3;

struct Compound {
  at::Layout layout = at::kSparse;
  bool coalesced = false;
  uint8_t sparse_dimensions = 0;  // of a COO tensor; its values have the others
  Dimensions sizes;

  size_t parts() const { return layout == at::kSparse ? 2 : 3; }
};

inline at::SparseTensorImpl* coo_impl(const at::Tensor& tensor) {
  return static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

// Does not use the dispatcher: this is called while an operator is being dispatched.
inline Compound compound_of(const at::Tensor& tensor) {
  Compound compound;
  compound.layout = tensor.layout();
  if (compound.layout == at::kSparse) {
    compound.coalesced = coo_impl(tensor)->coalesced();
    compound.sparse_dimensions = static_cast<uint8_t>(coo_impl(tensor)->sparse_dim());
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(at::sparse_csr::is_sparse_compressed(tensor), "tensors of layout ",
                                compound.layout, " do not live on a proxied device");
  }
  compound.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  return compound;
}

using Parts = c10::SmallVector<at::Tensor, kPartsMax>;

inline Parts parts_of(const at::Tensor& tensor) {
  if (tensor.layout() == at::kSparse) {
    return {coo_impl(tensor)->indices(), coo_impl(tensor)->values()};
  }
  const auto* impl = at::sparse_csr::get_sparse_csr_impl(tensor);
  return {impl->compressed_indices(), impl->plain_indices(), impl->values()};
}

inline void put_compound(Writer& out, const Compound& compound) {
  out.put<uint8_t>(static_cast<uint8_t>(compound.layout));
  out.put<uint8_t>(compound.coalesced);
  out.put<uint8_t>(compound.sparse_dimensions);
  out.put<uint8_t>(static_cast<uint8_t>(compound.sizes.size()));
  out.put_bytes(compound.sizes.data(), compound.sizes.size() * sizeof(int64_t));
}

// Rejects what no sparse tensor can have: reader.ok() is then false. Does not check that the parts
// are consistent.
inline Compound get_compound(Reader& in) {
  Compound compound;
  const uint8_t layout = in.get<uint8_t>();
  const uint8_t coalesced = in.get<uint8_t>();
  compound.sparse_dimensions = in.get<uint8_t>();
  const uint8_t dimensions = in.get<uint8_t>();
  compound.layout = static_cast<at::Layout>(layout);
  compound.coalesced = coalesced != 0;
  const bool coo = compound.layout == at::kSparse;
  const bool compressed = compound.layout == at::kSparseCsr || compound.layout == at::kSparseCsc ||
                          compound.layout == at::kSparseBsr || compound.layout == at::kSparseBsc;
  if ((!coo && !compressed) || coalesced > (coo ? 1 : 0) || dimensions > kDimensionsMax ||
      compound.sparse_dimensions > (coo ? dimensions : 0)) {
    in.fail();
  }
  const auto bytes = in.get_bytes(size_t{dimensions} * sizeof(int64_t));
  compound.sizes.resize(bytes.size() / sizeof(int64_t));
  if (!bytes.empty()) std::memcpy(compound.sizes.data(), bytes.data(), bytes.size());
  for (const int64_t size : compound.sizes) {
    if (size < 0) in.fail();
  }
  return compound;
}

}  // namespace sing
