// Memory, geometry and copies of the asynchronous device.
#include "tests/device/copies.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/TensorImpl.h>
#include <torch/library.h>

#include <cstring>

#include "tests/device/backend.h"

namespace sing::test {

namespace {

constexpr c10::DispatchKeySet kKeys{c10::DispatchKey::PrivateUse1};
// As CUDA: up to this size, a copy from pageable memory is done with that memory when the call
// returns; a larger one is done altogether.
constexpr uint64_t kStagedBytes = 64 << 10;
constexpr int kPoison = 0xa5;  // in a target that was read too early
constexpr uint64_t kSampledBytes = 1 << 20;

// Of the bytes, or of every 61st word of many.
uint64_t hash_of(const void* data, uint64_t bytes) {
  const auto* at = static_cast<const std::byte*>(data);
  const uint64_t step = bytes > kSampledBytes ? 61 * 8 : 8;
  uint64_t hash = bytes;
  for (uint64_t i = 0; i + 8 <= bytes; i += step) {
    uint64_t word;
    std::memcpy(&word, at + i, 8);
    hash = (hash ^ word) * 0x9e3779b97f4a7c15;
  }
  for (uint64_t i = bytes / 8 * 8; i < bytes; ++i) hash = hash * 31 + static_cast<uint64_t>(at[i]);
  return hash;
}

at::ScalarType type_of(const std::optional<at::ScalarType>& dtype) {
  return dtype.value_or(c10::get_default_dtype_as_scalartype());
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, c10::GetAllocator(c10::DeviceType::PrivateUse1), kKeys,
                                   type_of(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, c10::GetAllocator(c10::DeviceType::PrivateUse1), kKeys, type_of(dtype));
}

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, self.storage_offset());
}

void resize_storage(const c10::Storage& storage, uint64_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr fresh = storage.allocator()->allocate(bytes);
  const uint64_t kept = std::min<uint64_t>(bytes, storage.nbytes());
  if (kept != 0) {
    AsyncDevice& device = AsyncDevice::at(storage.device().index());
    Task task;
    for (void* context : {storage.data_ptr().get_context(), fresh.get_context()}) {
      task.uses.push_back(static_cast<DeviceBlock*>(context)->shared_from_this());
    }
    task.work = [to = fresh.get(), from = storage.data(), kept] { std::memcpy(to, from, kept); };
    device.launch(current_stream(device), std::move(task));
  }
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(bytes);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  if (self.sizes() != size) {
    c10::TensorImpl* impl = self.unsafeGetTensorImpl();
    impl->set_sizes_contiguous(size);
    const uint64_t bytes =
        impl->numel() == 0
            ? 0
            : static_cast<uint64_t>(self.storage_offset() + impl->numel()) * self.itemsize();
    if (bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  }
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  std::vector<int64_t> strides(stride.begin(), stride.end());
  if (strides.size() != size.size()) {
    strides.assign(size.size(), 1);
    for (size_t i = size.size(); i-- > 1;) strides[i - 1] = strides[i] * size[i];
  }
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, strides, offset);
  return self;
}

// ---------------------------------------------------------------- copies

void launch_copy(AsyncDevice& device, Task task, uint64_t bytes) {
  task.copy = true;
  task.cost_ns = device.copy_ns(bytes);
  device.launch(current_stream(device), std::move(task));
}

// `host` is contiguous and has the geometry of `to`.
void copy_in(const at::Tensor& host, const at::Tensor& to, bool non_blocking) {
  AsyncDevice& device = async_device_of(to);
  const bool pinned = is_pinned(host.const_data_ptr());
  const bool staged = !pinned && host.nbytes() <= kStagedBytes;
  Task task;
  const at::Tensor target = host_alias(to, task.uses);
  if (staged || !non_blocking || !pinned) {
    task.work = [target, source = staged ? host.clone() : host] { target.copy_(source); };
  } else {
    const uint64_t hash = hash_of(host.const_data_ptr(), host.nbytes());
    task.work = [&device, target, host, hash] {
      if (hash_of(host.const_data_ptr(), host.nbytes()) != hash) {
        device.note_violation("host memory changed before it was copied to the device");
      }
      target.copy_(host);
    };
  }
  launch_copy(device, std::move(task), host.nbytes());
  if (!staged && !(pinned && non_blocking)) device.synchronize(current_stream(device));
}

void copy_out(const at::Tensor& from, const at::Tensor& host, bool non_blocking) {
  AsyncDevice& device = async_device_of(from);
  const bool waits = !non_blocking || !is_pinned(host.const_data_ptr());
  if (!waits && device.poisons() && host.is_contiguous()) {
    std::memset(host.mutable_data_ptr(), kPoison, host.nbytes());
  }
  Task task;
  task.work = [source = host_alias(from, task.uses), host] { host.copy_(source); };
  launch_copy(device, std::move(task), host.nbytes());
  if (waits) device.synchronize(current_stream(device));
}

void copy_on_device(const at::Tensor& from, const at::Tensor& to) {
  AsyncDevice& device = async_device_of(to);
  Task task;
  const at::Tensor source = host_alias(from, task.uses), target = host_alias(to, task.uses);
  task.work = [source, target] { target.copy_(source); };
  task.kernel = true;
  task.cost_ns = device.kernel_ns();
  device.launch(current_stream(device), std::move(task));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const at::Tensor source = from.expand(to.sizes());
  if (to.numel() == 0) return to;
  if (source.device().is_cpu()) {
    const bool same = source.scalar_type() == to.scalar_type() && source.is_contiguous();
    copy_in(same ? source : source.to(to.scalar_type()).contiguous(), to, non_blocking);
  } else if (to.device().is_cpu()) {
    copy_out(source, to, non_blocking);
  } else {
    copy_on_device(source, to);
  }
  return to;
}

at::Scalar local_scalar(const at::Tensor& self) {
  AsyncDevice& device = async_device_of(self);
  device.synchronize(current_stream(device));
  std::vector<DeviceBlockPtr> uses;
  return host_alias(self, uses).item();
}

}  // namespace

at::Tensor to_device(const at::Tensor& host, int index) {
  at::Tensor made = at::empty_strided(host.sizes(), host.strides(),
                                      host.options().device(AsyncDevice::device(index)));
  copy_from(host, made, false);
  return made;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("_copy_from", &copy_from);
  library.impl("_local_scalar_dense", &local_scalar);
}

}  // namespace sing::test
