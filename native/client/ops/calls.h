// The kernel behind almost every operator of the device.
#pragma once

#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>

#include "client/ops/results.h"
#include "client/ops/tensors.h"

namespace sing::client {

// Sends one operator to the worker. The geometry of the results comes from (in this order) the
// cache, torch's own C++ shape function if there is one, a rule of shapes.cpp, or the worker's
// answer.
void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// The same for an operator whose operands `encode` adds, if this thread had such results recently.
// Otherwise does nothing and returns nullopt: the caller then uses call(), which looks in the cache
// and counts the miss.
std::optional<Results> call_known(Operator& op, c10::function_ref<void(Encoder&)> encode);

// True for an operand on the host that is not a number: it is moved to the device first, or
// refused.
inline bool must_move(const at::Tensor& tensor) {
  return tensor.defined() && !on_device(tensor) && tensor.dim() != 0;
}

}  // namespace sing::client
