#include "operators/operands.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include <algorithm>

namespace sing_double {
namespace {

using at::Tensor;
using c10::IValue;

// Bytes from the first to the last element of a tensor.
size_t extent(const Tensor& tensor) {
  if (!tensor.numel()) return 0;
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return static_cast<size_t>(last + 1) * tensor.itemsize();
}

const char* data_of(const Tensor& tensor) {
  return static_cast<const char*>(tensor.const_data_ptr());
}

void check(cudaError_t code) {
  TORCH_CHECK(code == cudaSuccess, "CUDA error: ", cudaGetErrorString(code));
}

void send(const Tensor& host, const Tensor& card) {
  if (!card.numel()) return;
  check(cudaMemcpyAsync(card.mutable_data_ptr(), host.const_data_ptr(), extent(card),
                        cudaMemcpyHostToDevice, current_stream()));
}

// Calls a function with each tensor of a value, and returns the value with the results.
template <typename Function>
IValue with_tensors(const IValue& value, const Function& function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& each : value.toTensorVector()) made.push_back(function(each));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const auto& each : value.toOptionalTensorVector()) {
      made.push_back(each && each->defined() ? std::optional(function(*each)) : each);
    }
    return made;
  }
  return value;
}

bool on_card(const Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

}  // namespace

cudaStream_t current_stream() {
  const c10::impl::VirtualGuardImpl card(c10::kCUDA);
  return static_cast<cudaStream_t>(card.getStream(card.getDevice()).native_handle());
}

void Operands::note(const IValue& value) {
  with_tensors(value, [this](const Tensor& tensor) {
    if (on_card(tensor) && tensor.numel()) {
      const char *begin = data_of(tensor), *end = begin + extent(tensor);
      auto [at, is_new] =
          ranges_.try_emplace(tensor.storage().unsafeGetStorageImpl(), Range{begin, end, Tensor()});
      at->second.begin = std::min(at->second.begin, begin);
      at->second.end = std::max(at->second.end, end);
    }
    return tensor;
  });
}

IValue Operands::to_host(const IValue& value) {
  if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(c10::kCPU);
  return with_tensors(value, [this](const Tensor& tensor) { return to_host(tensor); });
}

Tensor Operands::to_host(const Tensor& tensor) {
  if (!on_card(tensor)) return tensor;
  for (const auto& [card, host] : copies_) {
    if (card.is_same(tensor)) return host;
  }
  const auto options = at::TensorOptions().dtype(tensor.dtype());
  Tensor host;
  if (!tensor.numel()) {
    host = at::empty_strided(tensor.sizes(), tensor.strides(), options);
  } else {
    Range& range = ranges_.at(tensor.storage().unsafeGetStorageImpl());
    if (!range.bytes.defined()) {
      const auto size = range.end - range.begin;
      range.bytes = at::empty({size}, at::kByte);
      check(cudaMemcpyAsync(range.bytes.mutable_data_ptr(), range.begin, static_cast<size_t>(size),
                            cudaMemcpyDeviceToHost, current_stream()));
      check(cudaStreamSynchronize(current_stream()));
    }
    const auto offset = (data_of(tensor) - range.begin) / static_cast<int64_t>(tensor.itemsize());
    host = at::empty({0}, options);
    host.set_(range.bytes.storage(), offset, tensor.sizes(), tensor.strides());
  }
  copies_.emplace_back(tensor, host);
  return host;
}

void Operands::write_back(const IValue& value) {
  with_tensors(value, [this](const Tensor& tensor) {
    if (!on_card(tensor)) return tensor;
    const auto same = [&](const auto& copy) { return copy.first.is_same(tensor); };
    const Tensor host = std::find_if(copies_.begin(), copies_.end(), same)->second;
    if (host.sizes() != tensor.sizes()) {  // of an `out=` operand
      tensor.resize_(host.sizes());
      send(host.contiguous(), tensor);
    } else {
      send(host, tensor);
    }
    return tensor;
  });
}

IValue Operands::to_card(const IValue& value) {
  return with_tensors(value, [](const Tensor& host) {
    if (!host.defined()) return host;
    const auto options = at::TensorOptions().dtype(host.dtype()).device(c10::kCUDA);
    const bool dense = host.is_non_overlapping_and_dense();
    const Tensor source = dense ? host : host.contiguous();
    Tensor card = at::empty_strided(source.sizes(), source.strides(), options);
    send(source, card);
    return card;
  });
}

Tensor Operands::original_of(const Tensor& host) const {
  for (const auto& [card, copy] : copies_) {
    if (copy.is_same(host)) return card;
  }
  return Tensor();
}

void Operands::clear_indices() {
  for (const auto& [card, host] : copies_) {
    if (host.scalar_type() == at::kLong || host.scalar_type() == at::kInt) host.zero_();
  }
}

}  // namespace sing_double
