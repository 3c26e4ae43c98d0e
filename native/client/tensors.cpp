#include "client/tensors.h"

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

namespace sing::client {

namespace {

// Also runs in forked children, where it must do nothing.
void free_slot(void* context) {
  if (context != nullptr && Session::connected() && !Session::forked()) {
    Session::get().free(static_cast<Slot*>(context));
  }
}

c10::DataPtr data_ptr(Slot* slot) {
  return {slot->address, slot, &free_slot, c10::Device(kDevice, 0)};
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    return data_ptr(Session::get().allocate(bytes, true));
  }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "device storages cannot be cloned byte by byte from the host");
  }
};

}  // namespace

c10::Allocator* allocator() {
  static DeviceAllocator* const instance = new DeviceAllocator();
  return instance;
}

Slot* slot_of(const c10::DataPtr& pointer) {
  TORCH_CHECK(
      pointer.get_deleter() == &free_slot,
      "this CUDA tensor was made from a foreign pointer, which a proxied device cannot use");
  return static_cast<Slot*>(pointer.get_context());
}

c10::Storage make_storage(Slot* slot) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), slot->bytes, data_ptr(slot), allocator(), true));
}

at::Tensor make_tensor(c10::Storage storage, const Geometry& geometry) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), kKeys,
                                                         c10::scalarTypeToTypeMeta(geometry.dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(geometry.sizes, geometry.strides,
                                                      geometry.offset);
  if (geometry.flags & kConjugate) tensor._set_conj(true);
  if (geometry.flags & kNegative) tensor._set_neg(true);
  return tensor;
}

namespace {
// The slot lives on under its new address: the old pointer must not free it.
void readdress(c10::StorageImpl* storage, Slot* slot) {
  c10::DataPtr old = storage->set_data_ptr(data_ptr(slot));
  old.release_context();
  storage->set_nbytes(slot->bytes);
}
}  // namespace

void resize_storage(c10::StorageImpl* storage, uint64_t bytes) {
  Slot* slot = slot_of(storage->data_ptr());
  Session::get().resize(slot, bytes);
  readdress(storage, slot);
}

void adopt_size(c10::StorageImpl* storage, uint64_t bytes) {
  Slot* slot = slot_of(storage->data_ptr());
  Session::get().charge(slot, bytes);
  readdress(storage, slot);
}

Geometry geometry_of(const at::Tensor& tensor) {
  Geometry geometry;
  geometry.dtype = tensor.scalar_type();
  geometry.offset = tensor.storage_offset();
  geometry.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  geometry.strides.assign(tensor.strides().begin(), tensor.strides().end());
  return geometry;
}

}  // namespace sing::client
