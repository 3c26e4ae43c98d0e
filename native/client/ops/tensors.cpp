#include "client/ops/tensors.h"

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

namespace sing::client {

namespace {

// Also runs in forked children, for what their parent had.
void free_slot(void* context) {
  auto* slot = static_cast<Slot*>(context);
  if (slot != nullptr && slot->made_in == generation && Session::connected()) {
    Session::get().free(slot);
  }
}

c10::DataPtr data_ptr(Slot* slot, c10::Device device) {
  return {slot->address, slot, &free_slot, device};
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    return data_ptr(Session::get().allocate(bytes, true), labelled_device());
  }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "device storages cannot be cloned byte by byte from the host");
  }
};

thread_local ShapesOnly* finding_shapes = nullptr;

}  // namespace

// Note [Guarded storages]: code that requests writable bytes from a storage wants to access device
// memory itself, and reaches this hook first. Torch does so, too, when it only computes shapes.
struct Guard {
  static void asked(c10::StorageImpl* storage) {
    TORCH_CHECK(finding_shapes != nullptr,
                "This code reads or writes the memory of a CUDA tensor itself, but that memory is "
                "in another process. Use operators of torch instead, or pass it tensor.cpu().");
    finding_shapes->asked_.push_back(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
  }
  // Torch before 2.13 has no such hook.
  template <typename Storage>
  static void set(Storage& storage) {
    if constexpr (requires { storage.set_materializer(&asked); }) {
      if (!storage.has_materializer()) storage.set_materializer(&asked);
    }
  }
};

ShapesOnly::ShapesOnly() : outer_(finding_shapes) { finding_shapes = this; }

ShapesOnly::~ShapesOnly() {
  finding_shapes = outer_;
  // Torch removes a hook once it was called.
  for (const auto& storage : asked_) Guard::set(*storage);
}

at::Tensor guarded(at::Tensor tensor) {
  Guard::set(*tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  return tensor;
}

c10::Allocator* allocator() {
  static DeviceAllocator* const instance = new DeviceAllocator();
  return instance;
}

bool is_ours(const c10::DataPtr& pointer) { return pointer.get_deleter() == &free_slot; }

Slot* slot_of(const c10::DataPtr& pointer) {
  TORCH_CHECK(
      is_ours(pointer),
      "this CUDA tensor was made from a foreign pointer, which a proxied device cannot use");
  auto* slot = static_cast<Slot*>(pointer.get_context());
  TORCH_CHECK(slot->made_in == generation,
              "this CUDA tensor belongs to the process from which this one was forked; make it in "
              "the function that this process runs, or pass it tensor.cpu()");
  return slot;
}

c10::Storage make_storage(Slot* slot) {
  auto storage =
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), slot->bytes,
                                            data_ptr(slot, labelled_device()), allocator(), true);
  Guard::set(*storage);
  return c10::Storage(std::move(storage));
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
// The slot continues to exist under its new address: the old pointer must not free it.
void readdress(c10::StorageImpl* storage, Slot* slot) {
  const c10::Device device = storage->device();
  storage->_mutable_data_ptr_no_checks().release_context();
  storage->set_data_ptr_noswap(data_ptr(slot, device));
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
