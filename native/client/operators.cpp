#include "client/operators.h"

#include <array>
#include <mutex>
#include <unordered_set>

#include <ATen/core/enum_tag.h>

#include "client/session.h"
#include "client/waiting.h"

namespace sing::client {

namespace {

// In-place operators that cannot be given a wrong shape: nothing is gained by waiting for them.
bool is_trusted(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::fill_.Scalar",     "aten::fill_.Tensor", "aten::zero_",
      "aten::normal_",          "aten::uniform_",     "aten::random_",
      "aten::random_.to",       "aten::random_.from", "aten::exponential_",
      "aten::bernoulli_.float", "aten::log_normal_",  "aten::cauchy_",
      "aten::geometric_",       "aten::copy_"};
  return names.count(name) != 0 || name.starts_with("aten::_foreach_") ||
         name.starts_with("aten::_fused_");
}

bool takes_host_indices(const std::string& name) {
  return name.starts_with("aten::index") || name.starts_with("aten::_index_put") ||
         name.starts_with("aten::_unsafe_index") || name.starts_with("aten::_ctc_loss");
}

// Operators whose numbers decide how large the result is.
bool is_range(const std::string& name) {
  return name.starts_with("aten::arange") || name.starts_with("aten::range") ||
         name.starts_with("aten::linspace") || name.starts_with("aten::logspace");
}

bool is_tensors(const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::TensorType) return true;
  const auto list = type->cast<c10::ListType>();
  return list && list->getElementType()->kind() == c10::TypeKind::TensorType;
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
  for (const c10::Argument& argument : schema.arguments()) {
    relevance.push_back(is_range(name) ? Relevance::value : relevance_of(argument.type()));
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
  // An out= form that has such a kernel (logsumexp.out) is none of torch's structured ones: what it
  // does to the size of its output, only the worker can tell.
  structured = !has_out && handle.hasKernelForDispatchKey(
                               c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
  masks = name == "aten::index.Tensor" || name == "aten::_unsafe_index.Tensor";
  dynamic = !masks && (handle.hasTag(at::Tag::dynamic_output_shape) ||
                       handle.hasTag(at::Tag::data_dependent_output));
  trusted = in_place && is_trusted(name);
  host_indices = takes_host_indices(name);
  shape = find_shape_rule(name);
}

uint32_t Operator::number() {
  uint32_t known = number_.load(std::memory_order_acquire);
  if (known != 0) return known;
  static std::mutex mutex;
  const auto lock = lock_without_gil(mutex);
  known = number_.load(std::memory_order_acquire);
  if (known == 0) {
    known = Session::get().define(schema.name(), schema.overload_name());
    number_.store(known, std::memory_order_release);
  }
  return known;
}

// Open addressing by the schema's address: a schema lives as long as its operator, and operators
// of loaded libraries are not unloaded. Readers take no lock.
Operator& find_operator(const c10::OperatorHandle& op) {
  static constexpr size_t kSlots = 1 << 14;
  static std::array<std::atomic<Operator*>, kSlots> table{};
  static std::mutex mutex;
  static size_t count = 0;
  const auto* key = &op.schema();
  size_t at = (reinterpret_cast<uintptr_t>(key) >> 4) * 0x9e3779b97f4a7c15u >> 50;
  for (;; at = (at + 1) % kSlots) {
    Operator* known = table[at].load(std::memory_order_acquire);
    if (known == nullptr) break;
    if (&known->schema == key) return *known;
  }
  std::lock_guard lock(mutex);
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
