#include "client/ops/compound.h"

#include <ATen/ops/_sparse_compressed_tensor_unsafe_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>

#include "client/ops/tensors.h"

namespace sing::client {

at::Tensor assemble(const Compound& compound, const Parts& parts) {
  const at::Tensor& values = parts.back();
  const c10::SymIntArrayRef sizes = c10::fromIntArrayRefSlow(compound.sizes);
  const c10::Device device = values.device();
  // Calls the implementations directly: autograd must not see what an operator returns.
  if (compound.layout == at::kSparse) {
    const int64_t sparse = compound.sparse_dimensions;
    return at::native::new_with_dims_and_tensor_sparse_symint(
        sparse, static_cast<int64_t>(compound.sizes.size()) - sparse, sizes, parts[0], values,
        values.scalar_type(), at::kSparse, device, std::nullopt, compound.coalesced);
  }
  return at::native::_sparse_compressed_tensor_unsafe_symint(
      parts[0], parts[1], values, sizes, values.scalar_type(), compound.layout, device);
}

void replace(const at::Tensor& self, const at::Tensor& changed) {
  TORCH_CHECK(self.layout() == changed.layout(), "an operator has made a tensor of layout ",
              changed.layout(), " out of one of layout ", self.layout());
  if (self.layout() == at::kSparse) {
    auto *to = coo_impl(self), *from = coo_impl(changed);
    to->raw_resize_(from->sparse_dim(), from->dense_dim(), from->sizes());
    to->set_indices_and_values_unsafe(from->indices(), from->values());
    to->set_coalesced(from->coalesced());
    return;
  }
  const auto* from = at::sparse_csr::get_sparse_csr_impl(changed);
  at::sparse_csr::get_sparse_csr_impl(self)->set_member_tensors(
      from->compressed_indices(), from->plain_indices(), from->values(), changed.sizes());
}

}  // namespace sing::client
