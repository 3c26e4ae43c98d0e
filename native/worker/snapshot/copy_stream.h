// Copies between a device and the host beside what the device computes.
//
// Note [Copy streams]. A device other than the CPU copies on a stream of its own, so that its
// kernels run meanwhile. Events keep the order: copies begin after what was given to the computing
// stream before them, and where a kernel needs a copy's result, or is about to overwrite what is
// copied, the computing stream waits for the event of that copy. The host only waits until the copy
// is in the stream's queue; the host is ahead of the device, so the device rarely notices that.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "worker/state/device_time.h"

namespace sing {

// Owners call it under their lock. `device`: the current one of the calling threads.
class CopyStream {
 public:
  CopyStream(c10::Device device, uint64_t buffer_bytes);

  // What is started from now on comes after what the computing stream was given so far.
  void follow();
  // Pinned memory for a copy, from a ring of a fixed size; undefined if all of it is in use.
  at::Tensor take_buffer();
  void give_back(at::Tensor buffer) { free_.push_back(std::move(buffer)); }
  bool has_buffer() const noexcept { return !free_.empty() || made_ < kBuffers; }
  // Start a copy. It has ended when the event says so.
  EventPtr start_out(const c10::Storage& storage, uint64_t offset, uint64_t count,
                     const at::Tensor& buffer);
  EventPtr start_in(const c10::Storage& storage, uint64_t offset, uint64_t count,
                    const at::Tensor& buffer);
  // The computing stream continues after the event.
  void let_computing_wait(const c10::Event& event) const;

 private:
  static constexpr size_t kBuffers = 16;

  EventPtr record() const;

  c10::Device device_;
  c10::Stream stream_;
  uint64_t buffer_bytes_;
  size_t made_ = 0;
  std::vector<at::Tensor> free_;
};

// Reads many small storages at once: one kernel gathers them, and one copy brings them to the host.
// Also times that the device has not reached yet.
class Gather {
 public:
  // `at`: where the bytes belong in what fill() is given.
  void add(uint64_t at, const c10::Storage& storage, uint64_t count);
  void add(uint64_t at, Stamp stamp) { stamps_.emplace_back(at, std::move(stamp)); }
  // Takes their bytes as the computing stream leaves them up to here.
  void start(c10::Device device);
  // Waits for the copy, and for the times.
  void fill(std::vector<std::byte>& into);

 private:
  struct Part {
    uint64_t at;
    uint64_t count;
  };
  std::vector<Part> parts_;
  std::vector<at::Tensor> tensors_;
  std::vector<std::pair<uint64_t, Stamp>> stamps_;
  at::Tensor host_;
  EventPtr done_;
};

}  // namespace sing
