#include "client/ops/copies.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "client/ops/calls.h"
#include "client/ops/tensors.h"

namespace sing::client {

namespace {

constexpr uint64_t kWriteBytes = uint64_t{4} << 20;  // of one record

thread_local ContentName name_of_copy;
thread_local bool is_last;

void put_range(Writer& out, uint32_t id, uint64_t offset, uint64_t count) {
  out.put<uint32_t>(id);
  out.put<uint32_t>(0);
  out.put<uint64_t>(offset);
  out.put<uint64_t>(count);
}

// Bytes of a tensor that covers its range of the storage without gaps, in storage order.
struct Range {
  uint32_t id;
  uint64_t offset;
  uint64_t count;
};

Range range_of(const at::Tensor& tensor) {
  return {slot_of(tensor)->id,
          static_cast<uint64_t>(tensor.storage_offset()) * tensor.element_size(),
          static_cast<uint64_t>(tensor.numel()) * tensor.element_size()};
}

// True if both hold their elements in the same order without gaps, so that bytes can be copied.
bool same_layout(const at::Tensor& one, const at::Tensor& other) {
  return one.scalar_type() == other.scalar_type() && one.sizes() == other.sizes() &&
         ((one.is_contiguous() && other.is_contiguous()) ||
          (one.strides() == other.strides() && one.is_non_overlapping_and_dense()));
}

// A name is that of the elements in their order.
bool is_named(const at::Tensor& tensor) { return name_of_copy && tensor.is_contiguous(); }

void write(const at::Tensor& self, const at::Tensor& host) {
  const Range range = range_of(self);
  const bool named = is_named(self);
  const auto* bytes = static_cast<const std::byte*>(host.const_data_ptr());
  Writer out;
  for (uint64_t at = 0; at < range.count; at += kWriteBytes) {
    const uint64_t count = std::min(kWriteBytes, range.count - at);
    out.clear();
    put_range(out, range.id, range.offset + at, count);
    if (named) out.put(name_of_copy);
    Session::get().append(RecordKind::write, out.view(), {bytes + at, count}, named ? kNamed : 0);
  }
}

void read(const at::Tensor& source, const at::Tensor& host) {
  const Range range = range_of(source);
  Writer out;
  put_range(out, range.id, range.offset, range.count);
  const bool named = is_named(source);
  if (named) out.put(name_of_copy);
  const bool last = is_last && range.count == source.storage().nbytes();
  Session::get().request(RecordKind::read, out.view(),
                         {static_cast<std::byte*>(host.mutable_data_ptr()), range.count},
                         static_cast<uint8_t>((named ? kNamed : 0) | (last ? kLast : 0)));
}

void copy_on_device(const at::Tensor& self, const at::Tensor& source) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  torch::jit::Stack stack{self, source, false};
  call(op, kKeys, &stack);
}

void copy_to_device(const at::Tensor& self, const at::Tensor& source) {
  const at::Tensor plain = source.resolve_conj().resolve_neg();
  if (same_layout(self, plain) && !self.is_conj() && !self.is_neg()) {
    write(self, plain);
    return;
  }
  // The bytes are sent unchanged; conversion and layout are done on the device, as on a GPU.
  const at::Tensor dense = plain.contiguous();
  const at::Tensor staged =
      at::empty(dense.sizes(), dense.options().device(self.device()).pinned_memory(false));
  write(staged, dense);
  copy_on_device(self, staged);
}

void copy_to_host(const at::Tensor& self, const at::Tensor& source) {
  at::Tensor plain = source;
  if (source.is_conj() || source.is_neg() || source.scalar_type() != self.scalar_type() ||
      !source.is_non_overlapping_and_dense()) {
    plain = at::empty(source.sizes(), source.options().dtype(self.scalar_type()));
    copy_on_device(plain, source);
  }
  if (same_layout(self, plain) && !self.is_conj() && !self.is_neg()) {
    read(plain, self);
    return;
  }
  const at::Tensor host =
      at::empty_strided(plain.sizes(), plain.strides(), plain.options().device(at::kCPU));
  read(plain, host);
  at::Tensor(self).copy_(host);
}

}  // namespace

void copy_named(at::Tensor& to, const at::Tensor& from, const ContentName& name, bool last) {
  struct Named {
    Named(const ContentName& name, bool last) {
      name_of_copy = name;
      is_last = last;
    }
    ~Named() {
      name_of_copy = {};
      is_last = false;
    }
  } const named(name, last);
  to.copy_(from);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool) {
  if (self.is_same(source)) return self;
  const at::Tensor expanded = source.sizes() == self.sizes() ? source : source.expand(self.sizes());
  if (self.numel() == 0) return self;
  at::assert_no_internal_overlap(self);
  at::assert_no_partial_overlap(self, source);
  if (on_device(self) && on_device(source)) {
    copy_on_device(self, expanded);
  } else if (on_device(self)) {
    TORCH_CHECK(source.device().is_cpu(), "cannot copy from ", source.device(), " to ",
                self.device());
    // If one number fills many elements, only one element is sent.
    copy_to_device(self, source.numel() == 1 ? source : expanded);
  } else {
    TORCH_CHECK(self.device().is_cpu(), "cannot copy from ", source.device(), " to ",
                self.device());
    copy_to_host(self, expanded);
  }
  return self;
}

at::Scalar local_scalar(const at::Tensor& self) {
  TORCH_CHECK(self.numel() == 1, "a Tensor with ", self.numel(),
              " elements cannot be converted to Scalar");
  at::Tensor host = at::empty(self.sizes(), self.options().device(at::kCPU));
  copy_to_host(host, self);
  return at::_local_scalar_dense(host);
}

}  // namespace sing::client
