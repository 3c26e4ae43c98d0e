// Writes an operator's operands as a call record, and the key of their geometry.
#pragma once

#include <deque>

#include <ATen/core/IListRef.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include "client/ops/operators.h"
#include "client/ops/tensors.h"

namespace sing::client {

class Encoder {
 public:
  // Encodes the operands of `op`; raises NotImplementedError for values that cannot be sent.
  void call(Operator& op, c10::ArrayRef<c10::IValue> operands);
  // The same in steps: begin(), then one operand after the other.
  void begin(Operator& op);
  void add(const at::Tensor& operand, Relevance) { tensor(operand); }
  void add(const at::ITensorListRef& operand, Relevance);
  void add(const c10::IValue& operand, Relevance relevance) { value(operand, relevance); }

  std::span<const std::byte> key() const { return key_.view(); }
  Writer& record() { return record_; }
  uint8_t flags() const { return flags_; }
  // Device tensors among the operands, in the order of their encoding.
  const c10::SmallVectorImpl<const at::Tensor*>& tensors() const { return tensors_; }
  bool has_mask() const { return has_mask_; }
  bool has_compound() const { return !parts_.empty(); }
  // Releases the operands, which would otherwise live until the next call.
  void let_go() {
    if (!parts_.empty()) parts_.clear();
  }

 private:
  void value(const c10::IValue& value, Relevance relevance);
  void list(const c10::IValue& value);
  void tensor(const at::Tensor& tensor);
  void host_tensor(const at::Tensor& tensor);
  void compound(const at::Tensor& tensor);
  template <class T>
  void both(T value) {
    record_.put(value);
    key_.put(value);
  }

  const Operator* op_ = nullptr;
  Writer record_;
  Writer key_;
  c10::SmallVector<const at::Tensor*, 16> tensors_;
  std::deque<at::Tensor> parts_;  // of sparse operands; tensors_ points to them
  bool has_mask_ = false;
  uint8_t flags_ = 0;
};

}  // namespace sing::client
