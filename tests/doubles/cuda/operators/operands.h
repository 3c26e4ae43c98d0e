// Copies of operands on the host, and their way back.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <cuda_runtime_api.h>

#include <map>
#include <vector>

namespace sing_double {

cudaStream_t current_stream();

class Operands {
 public:
  // The value with all tensors of the card replaced by copies on the host. Tensors that share
  // memory on the card share it there.
  c10::IValue to_host(const c10::IValue& value);
  // Must be called with all values before `to_host`: finds what their tensors share.
  void note(const c10::IValue& value);
  // Sends the copy of a tensor that the operator has changed back to the card.
  void write_back(const c10::IValue& value);
  // The value with all tensors of the host replaced by copies on the card.
  static c10::IValue to_card(const c10::IValue& value);
  // The operand of the card that a tensor of the host is the copy of; undefined if there is none.
  at::Tensor original_of(const at::Tensor& host) const;
  // Sets all numbers of type integer to 0.
  void clear_indices();

 private:
  struct Range {
    const char* begin;
    const char* end;
    at::Tensor bytes;
  };

  at::Tensor to_host(const at::Tensor& tensor);

  // By storage; a storage's tensors are in one range.
  std::map<const void*, Range> ranges_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // of the card, and of the host
};

}  // namespace sing_double
