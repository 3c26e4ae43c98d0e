// Device tensors of the client: geometry and a numbered storage, no bytes.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include "client/log/session.h"
#include "oplog/geometry.h"

namespace sing::client {

inline constexpr c10::DeviceType kDevice = c10::DeviceType::CUDA;
inline constexpr c10::DispatchKeySet kKeys{c10::DispatchKey::CUDA};

// Allocates what `at::empty` and storages created by Python ask for.
c10::Allocator* allocator();

// Whether a storage's memory is the device's, and not a foreign pointer.
bool is_ours(const c10::DataPtr& pointer);

// The storage behind a device tensor. Raises if it is not one of ours (a foreign pointer).
Slot* slot_of(const c10::DataPtr& pointer);
inline Slot* slot_of(const at::Tensor& tensor) {
  return slot_of(tensor.unsafeGetTensorImpl()->unsafe_storage().data_ptr());
}

// A storage around a slot that a record binds.
c10::Storage make_storage(Slot* slot);
at::Tensor make_tensor(c10::Storage storage, const Geometry& geometry);
// A new tensor whose storage came from `allocator`: code that asks it for bytes is told that they
// are not in this process. Storages of `make_storage` tell so, too.
at::Tensor guarded(at::Tensor tensor);

// While it lives, torch's shape functions in this thread may ask for addresses.
class ShapesOnly {
 public:
  ShapesOnly();
  ~ShapesOnly();
  ShapesOnly(const ShapesOnly&) = delete;
  ShapesOnly& operator=(const ShapesOnly&) = delete;

 private:
  friend struct Guard;
  ShapesOnly* outer_;
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> asked_;
};

// Gives the storage another size on both sides; bytes up to the smaller one are kept.
void resize_storage(c10::StorageImpl* storage, uint64_t bytes);
// The worker has given the storage this size already.
void adopt_size(c10::StorageImpl* storage, uint64_t bytes);

Geometry geometry_of(const at::Tensor& tensor);

inline bool on_device(const at::Tensor& tensor) { return tensor.device().type() == kDevice; }

}  // namespace sing::client
