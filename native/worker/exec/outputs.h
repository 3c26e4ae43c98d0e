// Binds the results of an operator to the client's storage numbers.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "worker/exec/decode.h"

namespace sing {

// One tensor that the client expects from a call. If the call is no request, it comes with the
// geometry that the client has already shown the notebook; in a request it is a number to use.
struct Expected {
  enum class Kind : uint8_t { none, undefined, tensor, alias };
  Kind kind = Kind::none;
  uint32_t id = 0;
  uint64_t bytes = 0;
  Geometry geometry;
};

// The outputs of a call, list by list; reused between calls to save allocations.
struct ExpectedReturns {
  struct Return {
    bool list = false;
    bool compound = false;  // may be sparse: as many numbers as a sparse tensor can have parts
    uint32_t first = 0;
    uint32_t count = 1;
  };
  std::vector<Return> returns;
  std::vector<Expected> items;

  std::span<const Expected> of(const Return& one) const {
    return std::span<const Expected>(items).subspan(one.first, one.count);
  }
};

// True if the tensor has the expected layout, apart from its sizes, and a storage of the expected
// size.
bool lies_as(const at::Tensor& tensor, const Expected& expected, c10::Device device);
// Returns the operand whose storage the result shares: the client already has a number for it. Null
// if there is none.
const Operand* aliased_operand(const Call& call, const at::Tensor& tensor);
// Checks that a result is an ordinary strided tensor.
void check_strided(const at::Tensor& tensor);
bool is_tensor_list(const c10::IValue& value);
at::Tensor tensor_of(const c10::IValue& value);

// Throws CorruptLog if the record holds values that no client writes.
void parse_outputs(Reader& in, uint16_t returns, bool request, ExpectedReturns& expected);

// Marks all results of a call that was not executed as lost.
void lose_outputs(State& state, const ExpectedReturns& expected,
                  const std::shared_ptr<const std::string>& cause);

// Binds results whose geometry was predicted. The notebook holds tensors of that geometry already.
// So a result with another memory layout is copied into place, and a result of another size or type
// is an error.
void bind_predicted(State& state, const Call& call, const ExpectedReturns& expected);

// Returns the storages of results whose geometry was predicted, item by item, without binding them;
// none for an alias, whose bytes are in place then.
std::vector<c10::Storage> results_of(const Call& call, const ExpectedReturns& expected,
                                     c10::Device device);

// Binds results of unknown geometry and describes them for the answer.
void bind_and_describe(State& state, const Call& call, const ExpectedReturns& expected,
                       Writer& answer);
// The same for results that are known, and have storages of their own.
void describe(const ExpectedReturns& expected, Writer& answer);

}  // namespace sing
