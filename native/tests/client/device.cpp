#include "tests/client/device.h"

#include <sys/socket.h>

#include <optional>

#include <ATen/ops/_to_copy.h>
#include <c10/core/Device.h>

#include "client/log/session.h"
#include "client/ops/tensors.h"
#include "client/torch/device.h"
#include "client/torch/kernels.h"

namespace sing::test {

Host& device() {
  static Host* const host = [] {
    auto* made = new Host(size_t{1} << 26);
    made->agent().device_kind = static_cast<uint32_t>(DeviceKind::software);
    made->agent().threads.store(1);
    made->agent().log_budget.store(UINT64_MAX);
    made->agent().presence.store(static_cast<uint32_t>(Presence::present));
    int bell[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, bell) != 0) throw_errno("socketpair");
    const SessionFiles files = made->files(-1);
    client::Session::connect(files.log, files.client, files.worker, files.agent, bell[0]);
    client::register_device();
    client::register_kernels();
    made->start();
    return made;
  }();
  return *host;
}

at::Tensor twin(const at::Tensor& tensor) {
  device();
  const Geometry geometry = client::geometry_of(tensor);
  client::Slot* slot = client::Session::get().allocate(geometry.storage_bytes(), true);
  return client::make_tensor(client::make_storage(slot), geometry);
}

std::vector<c10::IValue> twins(const std::vector<c10::IValue>& operands) {
  std::vector<c10::IValue> made;
  for (const c10::IValue& operand : operands) {
    if (operand.isTensor() && operand.toTensor().defined()) {
      made.emplace_back(twin(operand.toTensor()));
    } else if (operand.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& item : operand.toTensorVector()) list.push_back(twin(item));
      made.emplace_back(std::move(list));
    } else {
      made.push_back(operand);
    }
  }
  return made;
}

at::Tensor to_device(const at::Tensor& tensor) {
  device();
  return at::_to_copy(tensor, at::TensorOptions().device(c10::Device(client::kDevice, 0)));
}

at::Tensor to_host(const at::Tensor& tensor) {
  return at::_to_copy(tensor, at::TensorOptions().device(at::kCPU));
}

}  // namespace sing::test
