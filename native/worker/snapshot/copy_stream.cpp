#include "worker/snapshot/copy_stream.h"

#include <ATen/ops/cat.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <cstring>

#include "worker/state/storages.h"

namespace sing {

// ---------------------------------------------------------------- the stream

CopyStream::CopyStream(c10::Device device, uint64_t buffer_bytes)
    : device_(device),
      stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)),
      buffer_bytes_(buffer_bytes) {}

void CopyStream::follow() {
  c10::Event event(device_.type());
  event.record(computing_stream(device_));
  event.block(stream_);
}

at::Tensor CopyStream::take_buffer() {
  if (free_.empty()) {
    if (made_ == kBuffers) return {};
    at::Tensor made = pinned_bytes(buffer_bytes_);
    ++made_;
    return made;
  }
  at::Tensor buffer = std::move(free_.back());
  free_.pop_back();
  return buffer;
}

EventPtr CopyStream::record() const {
  auto event = std::make_shared<c10::Event>(device_.type());
  event->record(stream_);
  return event;
}

EventPtr CopyStream::start_out(const c10::Storage& storage, uint64_t offset, uint64_t count,
                               const at::Tensor& buffer) {
  const c10::StreamGuard guard(stream_);
  buffer.narrow(0, 0, static_cast<int64_t>(count))
      .copy_(bytes_of(storage, offset, count), /*non_blocking=*/true);
  return record();
}

EventPtr CopyStream::start_in(const c10::Storage& storage, uint64_t offset, uint64_t count,
                              const at::Tensor& buffer) {
  const c10::StreamGuard guard(stream_);
  bytes_of(storage, offset, count)
      .copy_(buffer.narrow(0, 0, static_cast<int64_t>(count)), /*non_blocking=*/true);
  return record();
}

void CopyStream::let_computing_wait(const c10::Event& event) const {
  event.block(computing_stream(device_));
}

// ---------------------------------------------------------------- small storages

void Gather::add(uint64_t at, const c10::Storage& storage, uint64_t count) {
  parts_.push_back({at, count});
  tensors_.push_back(bytes_of(storage, 0, count));
}

void Gather::start(c10::Device device) {
  if (tensors_.empty()) return;
  int64_t total = 0;
  for (const Part& part : parts_) total += static_cast<int64_t>(part.count);
  host_ = pinned_bytes(static_cast<uint64_t>(total));
  try {
    host_.copy_(at::cat(tensors_), /*non_blocking=*/true);
  } catch (const c10::OutOfMemoryError&) {
    int64_t at = 0;
    for (const at::Tensor& tensor : tensors_) {
      host_.narrow(0, at, tensor.numel()).copy_(tensor, /*non_blocking=*/true);
      at += tensor.numel();
    }
  }
  tensors_.clear();
  done_ = std::make_shared<c10::Event>(device.type());
  done_->record(computing_stream(device));
}

void Gather::fill(std::vector<std::byte>& into) {
  for (const auto& [at, stamp] : stamps_) {
    const int64_t ns = stamp.resolve();
    std::memcpy(into.data() + at, &ns, sizeof(ns));
  }
  if (!done_) return;
  done_->synchronize();
  const std::byte* from = span_of(host_).data();
  for (const Part& part : parts_) {
    std::memcpy(into.data() + part.at, from, part.count);
    from += part.count;
  }
}

}  // namespace sing
