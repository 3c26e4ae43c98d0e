#include "worker/operators/operators.h"

#include <ATen/core/enum_tag.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/utils/schema_info.h>

#include <algorithm>

#include "ops/inexact.h"
#include "worker/exec/failures.h"
#include "worker/operators/substitutes.h"

namespace sing {

namespace {

using Kind = ArgumentType::Kind;

Kind kind_of(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::TensorType:
      return Kind::tensor;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::ScalarTypeType:
    case c10::TypeKind::LayoutType:
    case c10::TypeKind::MemoryFormatType:
      return Kind::integer;
    case c10::TypeKind::FloatType:
    case c10::TypeKind::SymFloatType:
      return Kind::real;
    case c10::TypeKind::BoolType:
    case c10::TypeKind::SymBoolType:
      return Kind::boolean;
    case c10::TypeKind::NumberType:
      return Kind::number;
    case c10::TypeKind::ComplexType:
      return Kind::complex;
    case c10::TypeKind::StringType:
      return Kind::string;
    case c10::TypeKind::DeviceObjType:
      return Kind::device;
    case c10::TypeKind::GeneratorType:
      return Kind::generator;
    case c10::TypeKind::ListType:
      return Kind::list;
    default:
      return Kind::unsupported;
  }
}

c10::TypePtr without_optional(const c10::TypePtr& type, bool& optional) {
  if (const auto wrapped = type->cast<c10::OptionalType>()) {
    optional = true;
    return wrapped->getElementType();
  }
  return type;
}

// Returns the element type of the IValue list: SymInt lists are passed as lists of int.
c10::TypePtr list_element(const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::SymIntType) return c10::IntType::get();
  return type;
}

// Returns the number of values of an enumeration, of which the schema knows only integers; 0: it is
// none. Torch prints an unknown memory format by a recursion that does not end.
int64_t options_of(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::ScalarTypeType:
      return c10::NumScalarTypes;
    case c10::TypeKind::LayoutType:
      return static_cast<int64_t>(c10::Layout::NumOptions);
    case c10::TypeKind::MemoryFormatType:
      return static_cast<int64_t>(c10::MemoryFormat::NumOptions);
    default:
      return 0;
  }
}

ArgumentType type_of(const c10::Argument& argument) {
  ArgumentType result;
  const c10::TypePtr type = without_optional(argument.type(), result.optional);
  result.kind = kind_of(*type);
  bool ignored = false;
  result.options = options_of(*without_optional(argument.real_type(), ignored));
  if (const auto list = type->cast<c10::ListType>()) {
    result.element_type = list_element(list->getElementType());
    result.element = kind_of(*without_optional(result.element_type, result.element_optional));
  }
  result.written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  result.out = argument.is_out() && result.written;
  return result;
}

// `out=` forms that leave bytes of their output unchanged.
bool keeps_out(std::string_view name) { return name.find("empty") != std::string_view::npos; }

// True if results and changes depend on nothing but the operands and torch's settings. Operators
// of libraries may do anything; bytes that nothing has defined differ each time.
bool is_determined(const Operator& op, const Row& row) {
  return op.name.starts_with("aten::") && !row.changes_any && !op.draws && !op.unknown &&
         !op.inexact && !keeps_out(op.name) && op.name.find("resize") == std::string::npos;
}

// Marks the arguments that a call may change: those that the schema or torch's list of exceptions
// names. The schemas of third-party operators (and of collectives) are not trusted.
void mark_changed(const Operator& op, const Row& row, std::vector<ArgumentType>& arguments) {
  const c10::FunctionSchema& schema = op.handle->schema();
  const bool known = (op.name.starts_with("aten::") && !row.changes_any) ||
                     op.name == "sing::prepare_graph" || op.name == "sing::run_graph";
  torch::utils::SchemaInfo info(schema);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& name = schema.arguments()[i].name();
    arguments[i].changed =
        !known || arguments[i].written ||
        info.is_mutable(c10::SchemaArgument(c10::SchemaArgType::input, i)) ||
        std::find(row.changes.begin(), row.changes.end(), name) != row.changes.end();
  }
}

}  // namespace

void Operators::define(uint32_t number, std::string name, std::string overload) {
  if (number >= kCountMax) throw CorruptLog("an operator's number is out of range");
  Operator op;
  op.full_name = overload.empty() ? name : name + "." + overload;
  op.name = std::move(name);
  op.overload = std::move(overload);
  if (!allowed_ || allowed_(op.full_name)) {
    op.handle = c10::Dispatcher::singleton().findSchema({op.name, op.overload});
  }
  if (op.handle) {
    const Row row = row_of(op.full_name);
    const c10::FunctionSchema& schema = op.handle->schema();
    for (const c10::Argument& argument : schema.arguments()) {
      op.arguments.push_back(type_of(argument));
      if (keeps_out(op.name)) op.arguments.back().out = false;
    }
    mark_changed(op, row, op.arguments);
    if (!op.arguments.empty() && row.overwrites_self) op.arguments[0].out = true;
    op.returns = schema.returns().size();
    // Graphs call kernels of torch.compile, which add with atomics, too.
    op.inexact = !software_ && (is_listed_inexact(op.name) || op.name == "sing::run_graph" ||
                                op.handle->hasTag(at::Tag::nondeterministic_bitwise));
    op.unknown = !software_ && !op.name.starts_with("aten::") && !op.name.starts_with("sing::");
    op.draws = op.name == "sing::run_graph" || op.handle->hasTag(at::Tag::nondeterministic_seeded);
    if (software_) op.sharing = row.sharing;
    op.determined = software_ && is_determined(op, row);
    op.by_elements = op.determined && row.by_elements;
    op.zeroes = op.determined && (op.name == "aten::zero_" || op.name == "aten::_foreach_zero_");
    op.substitute = software_ ? row.substitute : row.gpu_substitute;
  }
  if (number >= operators_.size()) operators_.resize(number + 1);
  operators_[number] = std::move(op);
}

const Operator& Operators::at(uint32_t number) const {
  const Operator* op = find(number);
  if (op == nullptr) throw CorruptLog("operator " + std::to_string(number) + " was not defined");
  return *op;
}

}  // namespace sing
