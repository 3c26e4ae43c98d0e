// The kernel behind almost every operator of the device.
#pragma once

#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>

#include "client/ops/results.h"
#include "client/ops/tensors.h"

namespace sing::client {

// Ships one operator. The results' geometry comes from (in this order) the cache, torch's own C++
// shape function where it has one, a rule of shapes.cpp, or the worker's answer.
void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// The same for one whose operands `encode` adds, if this thread had such results lately. Otherwise
// nothing was done: call() looks in the cache, and there is counted what is not known.
std::optional<Results> call_known(Operator& op, c10::function_ref<void(Encoder&)> encode);

// An operand on the host which is no number: it goes to the device first, or is refused.
inline bool must_move(const at::Tensor& tensor) {
  return tensor.defined() && !on_device(tensor) && tensor.dim() != 0;
}

}  // namespace sing::client
