// Device tensors of the client: geometry and a numbered storage, no bytes.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include "client/log/session.h"
#include "client/torch/labels.h"
#include "oplog/geometry.h"

namespace sing::client {

inline constexpr c10::DispatchKeySet kKeys{c10::DispatchKey::CUDA};

// Allocator for `at::empty` and for storages created by Python.
c10::Allocator* allocator();

// True if a storage's memory is the device's, and not a foreign pointer.
bool is_ours(const c10::DataPtr& pointer);

// The storage behind a device tensor. Raises if it is not one of ours (a foreign pointer).
Slot* slot_of(const c10::DataPtr& pointer);
inline Slot* slot_of(const at::Tensor& tensor) {
  return slot_of(tensor.unsafeGetTensorImpl()->unsafe_storage().data_ptr());
}

// Makes a storage around a slot that a record binds.
c10::Storage make_storage(Slot* slot);
at::Tensor make_tensor(c10::Storage storage, const Geometry& geometry);
// Guards a new tensor whose storage came from `allocator`: code that requests its bytes gets an
// error, as they are not in this process. Storages of `make_storage` are guarded, too.
at::Tensor guarded(at::Tensor tensor);

// While an instance exists, torch's shape functions in this thread may request addresses.
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

// Resizes the storage in client and worker; bytes up to the smaller size are kept.
void resize_storage(c10::StorageImpl* storage, uint64_t bytes);
// Adopts a size that the worker has already given to the storage.
void adopt_size(c10::StorageImpl* storage, uint64_t bytes);

Geometry geometry_of(const at::Tensor& tensor);

inline bool on_device(const at::Tensor& tensor) { return tensor.device().type() == kDevice; }

}  // namespace sing::client
