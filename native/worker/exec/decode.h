// Turns the values of a call record into the operands of an operator.
//
// Records are untrusted. Everything is checked before anything is executed: a value that no client
// writes (a tensor outside of its storage, an unknown storage) is a CorruptLog; a value that only
// does not fit the operator (a number instead of a list) is an error of that call.
#pragma once

#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include <span>
#include <string>

#include "oplog/codec.h"
#include "oplog/compound.h"
#include "oplog/geometry.h"
#include "worker/exec/failures.h"
#include "worker/state/state.h"

namespace sing {

// Checks that a record ends here: anything but padding after its payload is an error.
inline void expect_end(const Reader& in) {
  if (!in.ok() || in.remaining() >= 8) throw CorruptLog("a record of a wrong length");
}

// A tensor operand that lives on the device.
struct Operand {
  uint32_t id = 0;
  uint16_t argument = 0;
  uint16_t element = 0;  // of a list
  bool written = false;
  bool changed = false;  // its bytes may change in the call
  bool out = false;
  bool fresh = false;     // its storage was not in memory before this call
  bool part = false;      // of a sparse tensor, which is the argument
  bool rewrites = false;  // a part of a version: see Note [Rewrites]
  uint32_t at = 0;        // where the storage's number stands, from the start of the arguments
  Geometry geometry;
  at::Tensor tensor;

  // True if the operator overwrites the whole storage, of that size, without reading it.
  bool overwrites(uint64_t bytes) const {
    return out && geometry.offset == 0 && geometry.is_contiguous() &&
           geometry.storage_bytes() == bytes;
  }
  // The bytes that it has in its storage, if it is contiguous.
  uint64_t offset() const {
    return static_cast<uint64_t>(geometry.offset) * c10::elementSize(geometry.dtype);
  }
  uint64_t count() const { return geometry.storage_bytes() - offset(); }
};

// A sparse tensor: its parts are operands, the first of them at `first`.
struct CompoundOperand {
  uint16_t argument = 0;
  uint16_t element = 0;
  size_t first = 0;
  Compound compound;
};

struct Call {
  torch::jit::Stack stack;
  c10::SmallVector<Operand, 8> operands;
  c10::SmallVector<CompoundOperand, 1> compounds;
  bool generators = false;  // an argument is one

  void clear() {
    stack.clear();
    operands.clear();
    compounds.clear();
    generators = false;
  }
};

// The tensor that a geometry describes in a storage.
at::Tensor make_tensor(const c10::Storage& storage, const Geometry& geometry);

// Decodes the operands of one operator, in two steps: parse() checks and describes them without
// touching the device; materialise() makes the tensors, which may need memory.
class Decoder {
 public:
  explicit Decoder(State& state) : state_(state) {}

  // Returns the first complaint that is an error of the call rather than a corrupt log, or "".
  std::string parse(Reader& in, const Operator& op, uint16_t arguments, Call& call);
  // `predicted`: no operand gets another size.
  void materialise(Call& call, bool predicted);
  // The same in other storages: one for each operand. Without sparse tensors.
  static void materialise(Call& call, std::span<const c10::Storage> storages);

 private:
  void prepare_changes(Call& call, bool predicted);
  c10::IValue value(Reader& in, const ArgumentType& type, int depth);
  c10::IValue scalar(Reader& in, Tag tag, ArgumentType::Kind kind);
  c10::IValue list(Reader& in, Tag tag, const ArgumentType& type, int depth);
  c10::IValue host_tensor(Reader& in);
  void device_tensor(Reader& in, const ArgumentType& type);
  void compound(Reader& in, const ArgumentType& type);
  c10::IValue complain(Tag tag);

  State& state_;
  Call* call_ = nullptr;
  std::string complaint_;
  size_t begin_ = 0;  // bytes that remained before the arguments
  uint16_t argument_ = 0;
  uint16_t element_ = 0;
};

}  // namespace sing
