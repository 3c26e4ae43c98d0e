// The boxed kernel behind almost every operator of the device.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace sing::client {

// Ships one operator. The results' geometry comes from (in this order) the cache, torch's own C++
// shape function where it has one, a rule of shapes.cpp, or the worker's answer.
void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace sing::client
