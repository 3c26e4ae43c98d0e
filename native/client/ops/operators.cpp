#include "client/ops/operators.h"

#include <array>
#include <mutex>
#include <unordered_map>

#include <ATen/core/enum_tag.h>

#include "client/log/forks.h"
#include "client/log/session.h"
#include "client/log/waiting.h"
#include "client/ops/origins.h"

namespace sing::client {

namespace {

bool is_tensors(const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::TensorType) return true;
  const auto list = type->cast<c10::ListType>();
  return list && list->getElementType()->kind() == c10::TypeKind::TensorType;
}

void add_kind(const c10::IValue& value, std::string& kinds) {
  char kind = 'v';
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    kind = tensor.defined() ? static_cast<char>(tensor.scalar_type()) : 'n';
    // For an empty tensor, a kernel may not check the types.
    if (tensor.defined() && tensor.numel() == 0) kinds.push_back('e');
  } else if (value.isString()) {
    kinds += value.toStringRef();
    kind = '\n';
  } else if (value.isNone()) {
    kind = 'n';
  } else if (value.isDouble()) {
    kind = 'd';
  } else if (value.isInt()) {
    kind = 'i';
  } else if (value.isBool()) {
    kind = 'b';
  } else if (value.isComplexDouble()) {
    kind = 'c';
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    const size_t start = kinds.size();
    for (const c10::IValue& item : value.toListRef()) {
      add_kind(item, kinds);
      // In a long list, consecutive operands of the same kind are noted once.
      if (kinds.size() > start + 1 && kinds.back() == kinds[kinds.size() - 2]) kinds.pop_back();
    }
  }
  kinds.push_back(kind);
}

Relevance relevance_of(const c10::TypePtr& type) {
  c10::TypePtr inner = type;
  if (const auto optional = type->cast<c10::OptionalType>()) inner = optional->getElementType();
  const auto kind = inner->kind();
  return kind == c10::TypeKind::NumberType || kind == c10::TypeKind::FloatType
             ? Relevance::type_only
             : Relevance::value;
}

}  // namespace

Operator::Operator(const c10::OperatorHandle& op)
    : handle(op),
      schema(op.schema()),
      name(schema.overload_name().empty() ? schema.name()
                                          : schema.name() + "." + schema.overload_name()),
      operands(schema.arguments().size()),
      returns(schema.returns().size()) {
  const Row row = row_of(name);
  counts = row.counts;
  for (const c10::Argument& argument : schema.arguments()) {
    relevance.push_back(row.sized_by_numbers || counts ? Relevance::value
                                                       : relevance_of(argument.type()));
    has_out = has_out || argument.is_out();
  }
  in_place = !has_out;
  for (const c10::Argument& result : schema.returns()) {
    int16_t operand = -1;
    if (result.alias_info() != nullptr) {
      for (size_t i = 0; i < operands; ++i) {
        const auto* alias = schema.arguments()[i].alias_info();
        if (alias != nullptr && alias->isWrite() && *alias == *result.alias_info()) {
          operand = static_cast<int16_t>(i);
        }
      }
    }
    aliases.push_back(operand);
    in_place = in_place && operand >= 0;
    plain = plain && is_tensors(result.type());
  }
  // An out= form that has such a kernel (logsumexp.out) is not one of torch's structured operators:
  // only the worker knows how it resizes its output.
  structured =
      !has_out && !row.own_geometry &&
      handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
  masks = row.masks;
  // The sizes of the results of another library's kernels are unknown.
  dynamic = is_foreign(name) || (!masks && (handle.hasTag(at::Tag::dynamic_output_shape) ||
                                            handle.hasTag(at::Tag::data_dependent_output)));
  trusted = in_place ? row.trusted : nullptr;
  host_indices = row.host_indices;
  self_on_device = row.self_on_device;
  dense_keeps_shape = row.dense_keeps_shape;
  shape = row.shape;
}

namespace {
std::mutex numbering;
const FreshAfterFork fresh_numbering(numbering);
std::mutex finding;
const HeldAtFork held_finding(finding);
std::mutex knowing;
const HeldAtFork held_knowing(knowing);
}  // namespace

uint32_t Operator::number() {
  uint32_t known = number_.load(std::memory_order_acquire);
  if (known != 0) return known;
  Writer origin;
  if (is_foreign(name)) put_origin(origin, schema.name());
  const auto lock = lock_without_gil(numbering);
  known = number_.load(std::memory_order_acquire);
  if (known == 0) {
    known = Session::get().define(schema.name(), schema.overload_name(), origin.view());
    number_.store(known, std::memory_order_release);
  }
  return known;
}

bool Operator::knows(const std::string& kinds) {
  std::lock_guard lock(knowing);
  return known_.count(kinds) != 0;
}

void Operator::learn(const std::string& kinds) {
  std::lock_guard lock(knowing);
  known_.insert(kinds);
}

std::string kinds_of(c10::ArrayRef<c10::IValue> operands) {
  std::string kinds;
  for (const c10::IValue& operand : operands) add_kind(operand, kinds);
  return kinds;
}

// Open addressing by the schema's address: a schema lives as long as its operator, and operators of
// loaded libraries are not unloaded. Readers take no lock.
Operator& find_operator(const c10::OperatorHandle& op) {
  static constexpr size_t kSlots = 1 << 14;
  static std::array<std::atomic<Operator*>, kSlots> table{};
  static size_t count = 0;
  const auto* key = &op.schema();
  size_t at = (reinterpret_cast<uintptr_t>(key) >> 4) * 0x9e3779b97f4a7c15u >> 50;
  for (;; at = (at + 1) % kSlots) {
    Operator* known = table[at].load(std::memory_order_acquire);
    if (known == nullptr) break;
    if (&known->schema == key) return *known;
  }
  std::lock_guard lock(finding);
  for (;; at = (at + 1) % kSlots) {
    Operator* known = table[at].load(std::memory_order_acquire);
    if (known == nullptr) break;
    if (&known->schema == key) return *known;
  }
  TORCH_CHECK(++count < kSlots / 2, "too many different operators in one process");
  auto* fresh = new Operator(op);
  table[at].store(fresh, std::memory_order_release);
  return *fresh;
}

}  // namespace sing::client
