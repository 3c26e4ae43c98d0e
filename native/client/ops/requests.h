// Calls whose results only the worker can determine.
#pragma once

#include <memory>

#include <ATen/core/stack.h>

#include "client/ops/encode.h"
#include "client/ops/operators.h"
#include "client/ops/plans.h"

namespace sing::client {

// Sends an operator and waits until it was executed; remembers what can be known of its results the
// next time.
void call_and_wait(Operator& op, Encoder& encoder, torch::jit::Stack& stack);

// Learns what an operator would return without executing it on its operands; null if that is not
// possible.
std::shared_ptr<Plan> probe(Operator& op, c10::ArrayRef<c10::IValue> operands);

}  // namespace sing::client
