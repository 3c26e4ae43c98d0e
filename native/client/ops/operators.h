// Properties of an operator that the client derives once from its schema.
#pragma once

#include <atomic>
#include <string>
#include <string_view>
#include <unordered_set>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include "client/ops/plans.h"
#include "ops/row.h"

namespace sing::client {

// How the geometry of the results may depend on an operand.
enum class Relevance : uint8_t { value, type_only };

struct Operator {
  explicit Operator(const c10::OperatorHandle& op);

  // The worker's number for it; the first use defines the operator in the log.
  uint32_t number();

  const c10::OperatorHandle handle;
  const c10::FunctionSchema& schema;
  std::string name;  // with overload, for messages
  size_t operands;
  size_t returns;
  c10::SmallVector<Relevance, 8> relevance;  // for each operand
  c10::SmallVector<int16_t, 4> aliases;      // for each return: index of the operand it is, or -1
  bool has_out = false;                      // an out= operand may be resized
  bool in_place = false;                     // no return is new: the geometry is known in advance
  Trust trusted = nullptr;  // in place, and its shape cannot be wrong: no need to wait
  bool structured =
      false;             // torch has a C++ shape function (CompositeExplicitAutogradNonFunctional)
  bool dynamic = false;  // the result's shape depends on data
  bool masks = false;    // ...only if an index is a mask
  bool host_indices = false;  // indices may be CPU tensors
  bool self_on_device = false;
  bool dense_keeps_shape = false;
  bool plain = true;    // returns only tensors, so that its answer can be cached
  bool counts = false;  // ...or also integers, which depend only on geometry
  ShapeRule shape = nullptr;

  // True if it was executed with operands of these kinds before, as recorded by learn().
  bool knows(const std::string& kinds);
  void learn(const std::string& kinds);

 private:
  std::atomic<uint32_t> number_{0};
  std::unordered_set<std::string> known_;
};

// The dtypes of the tensors and numbers among operands, and the operands that are strings.
std::string kinds_of(c10::ArrayRef<c10::IValue> operands);

Operator& find_operator(const c10::OperatorHandle& op);

// What the table of operators (ops/table.h) says about one; shapes.cpp includes the table.
Row row_of(std::string_view full_name);
const Table& table();

}  // namespace sing::client
