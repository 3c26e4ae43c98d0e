#include "client/ops/unboxed.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>

#include <ATen/core/IListRef.h>

#include "client/ops/calls.h"

namespace sing::client {

namespace {

using Handle = c10::OperatorHandle;

template <class T>
bool stays(const T&) {
  return true;
}
bool stays(const at::Tensor& tensor) { return !must_move(tensor); }
bool stays(const at::ITensorListRef& tensors) {
  return std::none_of(tensors.begin(), tensors.end(), must_move);
}

template <class... Operands>
std::optional<Results> try_known(const Handle& handle, const Operands&... operands) {
  if (!(stays(operands) && ...)) return std::nullopt;
  Operator& op = find_operator(handle);
  return call_known(op, [&](Encoder& encoder) {
    size_t index = 0;
    (encoder.add(operands, op.relevance[index++]), ...);
  });
}

// Calls the operator by the general way; one result is new.
template <class... Operands>
at::Tensor call_boxed(const Handle& handle, const Operands&... operands) {
  torch::jit::Stack stack;
  torch::jit::push(stack, operands...);
  call(handle, {}, &stack);
  return std::move(stack.back()).toTensor();
}

// (operands) -> Tensor
template <class... Operands>
torch::CppFunction making(const Handle& handle) {
  return torch::CppFunction([handle](Operands... operands) -> at::Tensor {
    if (auto results = try_known(handle, operands...)) [[likely]]
      return std::move(results->front()).toTensor();
    return call_boxed(handle, operands...);
  });
}

// (changed, operands) -> changed
template <class... Operands>
torch::CppFunction changing(const Handle& handle) {
  return torch::CppFunction([handle](at::Tensor& self, Operands... operands) -> at::Tensor& {
    if (!try_known(handle, self, operands...)) [[unlikely]]
      call_boxed(handle, self, operands...);
    return self;
  });
}

// A letter for each argument, and for what is returned: 'T' a tensor, 'W' one that is changed, 'S'
// a number, 'i', 'I', 'b' an integer, one that may be symbolic, a boolean, '?' anything else.
std::string signature_of(const c10::FunctionSchema& schema) {
  const auto letter = [](const c10::Argument& argument) {
    const bool changed = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    const c10::TypePtr& type = argument.real_type();
    switch (type->kind()) {
      case c10::TypeKind::TensorType:
        return changed ? 'W' : 'T';
      case c10::TypeKind::NumberType:
        return 'S';
      case c10::TypeKind::IntType:
        return 'i';
      case c10::TypeKind::SymIntType:
        return 'I';
      case c10::TypeKind::BoolType:
        return 'b';
      default:
        return '?';
    }
  };
  std::string signature;
  for (const c10::Argument& argument : schema.arguments()) signature += letter(argument);
  signature += '>';
  for (const c10::Argument& result : schema.returns()) signature += letter(result);
  return signature;
}

using T = const at::Tensor&;
using S = const at::Scalar&;

constexpr std::array<std::pair<std::string_view, torch::CppFunction (*)(const Handle&)>, 20>
    kKernels{{
        {"T>T", &making<T>},
        {"TT>T", &making<T, T>},
        {"TTT>T", &making<T, T, T>},
        {"TS>T", &making<T, S>},
        {"ST>T", &making<S, T>},
        {"TTS>T", &making<T, T, S>},
        {"TSS>T", &making<T, S, S>},
        {"TTTS>T", &making<T, T, T, S>},
        {"TTTSS>T", &making<T, T, T, S, S>},
        {"Ti>T", &making<T, int64_t>},
        {"Tib>T", &making<T, int64_t, bool>},
        {"TiT>T", &making<T, int64_t, T>},
        {"TTIbb>T", &making<T, T, int64_t, bool, bool>},
        {"W>W", &changing<>},
        {"WT>W", &changing<T>},
        {"WS>W", &changing<S>},
        {"WTS>W", &changing<T, S>},
        {"WTT>W", &changing<T, T>},
        {"WTTS>W", &changing<T, T, S>},
        {"WSS>W", &changing<S, S>},
    }};

}  // namespace

torch::CppFunction shipping_kernel(const Handle& op) {
  if (op.schema().operator_name() == c10::OperatorName("aten::cat", "")) {
    return making<const at::ITensorListRef&, int64_t>(op);
  }
  const std::string signature = signature_of(op.schema());
  for (const auto& [known, kernel] : kKernels) {
    if (known == signature) return kernel(op);
  }
  return torch::CppFunction::makeFromBoxedFunction<&call>();
}

}  // namespace sing::client
