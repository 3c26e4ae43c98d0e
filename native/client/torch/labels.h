// Names of the device.
//
// Note [Labels]. A session has one device, but programs of several processes name theirs cuda:0,
// cuda:1, and so on: the process of rank 1 makes its tensors on cuda:1. So an index is only a
// label, which tensors keep: that of a result is the label of the first operand on the device.
// Tensors with different labels are on the same device, and operators may mix them.
#pragma once

#include <utility>

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

namespace sing::client {

inline constexpr c10::DeviceType kDevice = c10::DeviceType::CUDA;

// Number of devices that programs are to see: of a rank, how many ranks there are on this host.
c10::DeviceIndex label_count() noexcept;
// Raises if no device has this index. A process with a session of its own may use any label: the
// function that started it knows how many there are.
void check_label(c10::DeviceIndex index);

// The current device of this thread, as in CUDA.
inline thread_local c10::DeviceIndex current_label = 0;
// Where this thread makes storages: in the scope of a Labelled.
inline thread_local c10::DeviceIndex storage_label = -1;

inline c10::Device labelled_device() noexcept {
  return {kDevice, storage_label >= 0 ? storage_label : current_label};
}

// Gives the storages that this thread makes a label; -1: that of the current device.
class Labelled {
 public:
  explicit Labelled(c10::DeviceIndex index) noexcept
      : outer_(std::exchange(storage_label, index)) {}
  ~Labelled() { storage_label = outer_; }
  Labelled(const Labelled&) = delete;
  Labelled& operator=(const Labelled&) = delete;

 private:
  const c10::DeviceIndex outer_;
};

// The label that an operator without operands on the device is asked for; -1: none.
c10::DeviceIndex requested_label(c10::ArrayRef<c10::IValue> operands) noexcept;

}  // namespace sing::client
