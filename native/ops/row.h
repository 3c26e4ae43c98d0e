// The columns of the table of operators (table.h), and how the rows of an operator are found.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/util/ArrayRef.h>

namespace sing {

namespace client {
struct Plan;
}

// How the client executes an operator on operands of one layout.
enum class Way : uint8_t {
  usual,   // dense: sent to the worker if torch has a kernel for a device, else torch's composite;
           // sparse and nested: torch's CPU function, which runs in the client
  whole,   // sent to the worker, though torch would replace it by other operators
  client,  // by a kernel of the client; client/torch/kernels.cpp registers it
  composite,  // torch's composite kernel, though torch has a kernel for a device
  cpu,        // torch's CPU function runs in the client, and calls operators on the parts
  no,         // returns false: it asks whether to use a library of GPUs
  refused,    // it reads a tensor's bytes, which are not in the client
};

// How an operator's work is divided among threads: by elements or rows of the results, each of
// which one thread computes, or, with some sizes, by the terms of a product's sums as well. See
// Note [Small operators] in worker/exec/alone.h.
enum class Sharing : uint8_t { unknown, elements, rows, sums };

// True if an operator cannot fail with these operands.
using Trust = bool (*)(c10::ArrayRef<c10::IValue> operands);

// A shape function: fills the plan for these operands, or returns false if it does not know them.
using ShapeRule = bool (*)(c10::ArrayRef<c10::IValue> operands, client::Plan& plan);

// Takes its operands from the stack and leaves its results there.
using Substitute = void (*)(torch::jit::Stack& stack);

// What applies to an operator in addition to its schema. An empty column: nothing special.
struct Row {
  // "aten::add.Tensor"; "aten::add.*" for all overloads of aten::add; "aten::_foreach_*" for all
  // operators whose names begin so.
  std::string_view name;

  // --- the client
  Way way = Way::usual;         // dense operands
  Way coo = Way::usual;         // sparse operands
  Way compressed = Way::usual;  // sparse operands in CSR, CSC, BSR or BSC
  Way nested = Way::usual;      // nested operands of the strided layout
  // In place, with a shape that cannot be wrong: no need to wait, unless numbers or dtypes may be
  // wrong, which the worker reports better than the client could.
  Trust trusted = nullptr;
  ShapeRule shape = nullptr;
  bool sized_by_numbers = false;   // numbers decide the geometry of the results
  bool counts = false;             // also returns integers, which depend only on geometry
  bool masks = false;              // the geometry depends on data only if an index is a mask
  bool host_indices = false;       // indices may be CPU tensors
  bool self_on_device = false;     // not even self may be a number on the CPU
  bool own_geometry = false;       // torch's shape function is not true of the worker's kernel
  bool dense_keeps_shape = false;  // a dense self to which a sparse tensor is added stays as it is

  // --- the worker
  bool overwrites_self = false;  // in place, without reading its first argument
  // Arguments that kernels change although the schema does not say so, in addition to the running
  // statistics that torch's SchemaInfo lists.
  std::array<std::string_view, 2> changes = {};
  bool changes_any = false;  // perhaps all arguments
  // It computes each element by itself, and does not fail after it has changed some, if all
  // operands have one shape and one floating dtype.
  bool by_elements = false;
  Sharing sharing = Sharing::unknown;
  Substitute substitute = nullptr;      // computes it on a software device
  Substitute gpu_substitute = nullptr;  // computes it on a GPU
};

// Finds what a table says about an operator. Not for every call: callers keep the result.
class Table {
 public:
  explicit Table(std::span<const Row> rows);
  // Combines all rows of an operator; in each column, the most specific row wins.
  Row find(std::string_view full_name) const;
  std::span<const Row> rows() const { return rows_; }

 private:
  std::span<const Row> rows_;
  std::unordered_map<std::string_view, const Row*> exact_, overloads_;
  std::vector<const Row*> beginnings_;  // the shortest first
};

inline void combine(Row& into, const Row& with) {
  const auto take = [](auto& value, const auto& other) {
    if (other != std::remove_cvref_t<decltype(other)>{}) value = other;
  };
  take(into.way, with.way);
  take(into.coo, with.coo);
  take(into.compressed, with.compressed);
  take(into.nested, with.nested);
  take(into.trusted, with.trusted);
  take(into.shape, with.shape);
  take(into.sized_by_numbers, with.sized_by_numbers);
  take(into.counts, with.counts);
  take(into.masks, with.masks);
  take(into.host_indices, with.host_indices);
  take(into.self_on_device, with.self_on_device);
  take(into.own_geometry, with.own_geometry);
  take(into.dense_keeps_shape, with.dense_keeps_shape);
  take(into.overwrites_self, with.overwrites_self);
  take(into.changes, with.changes);
  take(into.changes_any, with.changes_any);
  take(into.by_elements, with.by_elements);
  take(into.sharing, with.sharing);
  take(into.substitute, with.substitute);
  take(into.gpu_substitute, with.gpu_substitute);
}

inline Table::Table(std::span<const Row> rows) : rows_(rows) {
  for (const Row& row : rows) {
    if (row.name.ends_with(".*")) {
      overloads_.emplace(row.name.substr(0, row.name.size() - 2), &row);
    } else if (row.name.ends_with('*')) {
      beginnings_.push_back(&row);
    } else {
      exact_.emplace(row.name, &row);
    }
  }
}

inline Row Table::find(std::string_view full_name) const {
  Row found{.name = full_name};
  for (const Row* row : beginnings_) {
    if (full_name.starts_with(row->name.substr(0, row->name.size() - 1))) combine(found, *row);
  }
  const auto overloads = overloads_.find(full_name.substr(0, full_name.find('.')));
  if (overloads != overloads_.end()) combine(found, *overloads->second);
  const auto exact = exact_.find(full_name);
  if (exact != exact_.end()) combine(found, *exact->second);
  return found;
}

}  // namespace sing
