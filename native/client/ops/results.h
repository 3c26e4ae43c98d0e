// Results of calls whose geometry is known in advance: the caller does not wait for the worker.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include "client/ops/encode.h"
#include "client/ops/operators.h"
#include "client/ops/plans.h"

namespace sing::client {

using Results = c10::SmallVector<c10::IValue, 4>;

c10::ArrayRef<c10::IValue> operands_of(const Operator& op, const torch::jit::Stack& stack);

// Drops the operands and pushes the results; results that are operands are taken from the stack.
void finish(const Operator& op, torch::jit::Stack& stack, Results&& fresh);

// Gives an out= operand the geometry that the operator will write. `told`: the worker has already
// written it.
void apply(const Change& change, c10::ArrayRef<c10::IValue> operands, bool told);

// Sends an operator that changes operands and creates no new tensors.
void send_in_place(const Operator& op, Encoder& encoder);

// Sends an operator whose results are as planned; omits results that are operands.
Results send_planned(const Operator& op, Encoder& encoder, const Plan& plan);

}  // namespace sing::client
