// Calls whose results only the worker knows.
#pragma once

#include <memory>

#include <ATen/core/stack.h>

#include "client/ops/encode.h"
#include "client/ops/operators.h"
#include "client/ops/plans.h"

namespace sing::client {

// Ships an operator and waits until it was executed; what can be known of its results the next time
// is remembered.
void call_and_wait(Operator& op, Encoder& encoder, torch::jit::Stack& stack);

// What an operator would return, learnt without executing it on its operands; null if it cannot be.
std::shared_ptr<Plan> probe(Operator& op, c10::ArrayRef<c10::IValue> operands);

}  // namespace sing::client
