// The operators of a session: the operators behind the client's numbers, and their arguments.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ops/row.h"

namespace sing {

// Type of an argument, flattened from its schema type for quick decoding.
struct ArgumentType {
  enum class Kind : uint8_t {
    tensor,
    integer,
    real,
    boolean,
    number,
    complex,
    string,
    device,
    generator,
    list,
    unsupported,
  };
  Kind kind = Kind::unsupported;
  bool optional = false;
  Kind element = Kind::unsupported;  // of a list
  bool element_optional = false;
  c10::TypePtr element_type;  // of a list
  bool written = false;       // according to the schema
  bool changed = false;       // written, or changed although the schema does not say so
  bool out = false;           // written without being read
  int64_t options = 0;        // of an enumeration: its number of values
};

struct Operator {
  std::string name;      // "aten::add"
  std::string overload;  // "out"
  std::string full_name;
  // None if this torch has no such operator: its calls fail, not the session.
  std::optional<c10::OperatorHandle> handle;
  Substitute substitute = nullptr;
  Sharing sharing = Sharing::unknown;
  std::vector<ArgumentType> arguments;
  size_t returns = 0;
  bool inexact = false;  // may give other bytes each time: ops/inexact.h
  bool unknown = false;  // of another library, on a GPU: nothing is known of that
  bool draws = false;    // it may draw random numbers
  // Equal operands give equal results and changes: see Note [Replicas].
  bool determined = false;
  bool by_elements = false;  // see Row
  bool zeroes = false;       // overwrites its first argument with zeros
};

// Limits on a log. No restriction, except for the fuzzer, which must not run the operators that it
// makes up.
struct Limits {
  using Allowed = bool (*)(std::string_view full_name);
  Allowed allowed = nullptr;         // true for operators that exist; null: all of this torch
  int64_t elements_max = INT64_MAX;  // of an operand
  bool check_writes = false;         // check that calls change only what their write sets name
  bool check_splicing = false;       // compare bytes that are held once: see Note [Replicas]
  uint64_t piece_bytes = 4 << 20;    // bytes copied at once between a storage and the arena
  uint64_t mapped_bytes = 1 << 20;   // extents of this size are mapped, not copied, when loaded
  // Calls that change versions of this size do that for all their owners: less is copied faster.
  uint64_t together_bytes = 1 << 20;
  // Time for which memory is kept that was taken in advance, see Snapshots::preallocate().
  uint64_t preallocated_ns = 600'000'000'000;
};

class Operators {
 public:
  static constexpr uint32_t kCountMax = 1 << 16;
  using Allowed = Limits::Allowed;

  // `software`: CUDA-only operators are computed by substitutes; a GPU needs few.
  Operators(bool software, Allowed allowed) : software_(software), allowed_(allowed) {}

  // Throws CorruptLog if the number is out of range.
  void define(uint32_t number, std::string name, std::string overload);
  // Throws CorruptLog if the number was not defined.
  const Operator& at(uint32_t number) const;
  // Null if it was not defined.
  const Operator* find(uint32_t number) const noexcept {
    return number < operators_.size() && !operators_[number].name.empty() ? &operators_[number]
                                                                          : nullptr;
  }
  const std::vector<Operator>& all() const { return operators_; }
  void clear() { operators_.clear(); }

 private:
  bool software_;
  Allowed allowed_;
  std::vector<Operator> operators_;
};

}  // namespace sing
