#include "worker/exec/decode.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>

#include "worker/exec/compound.h"
#include "worker/operators/origins.h"

namespace sing {

namespace {

using Kind = ArgumentType::Kind;
constexpr int kDepthMax = 4;

// Returns the number of elements, or throws CorruptLog: broadcast sizes may claim more than 2^63.
int64_t element_count(const Geometry& geometry, int64_t most) {
  int64_t count = 1;
  bool empty = false, overflow = false;
  for (const int64_t size : geometry.sizes) {
    empty = empty || size == 0;
    overflow = overflow || size > most || __builtin_mul_overflow(count, size, &count);
  }
  if ((overflow || count > most) && !(empty && most == INT64_MAX)) {
    throw CorruptLog("a tensor of impossible size");
  }
  return empty ? 0 : count;
}

// Returns an earlier operand that is the same tensor. A tensor that is passed twice must be one
// object for the operator, too: this is how self-attention is recognized. A tensor that the
// operator may resize must not be shared with others, unless it is empty: then the operator (cat)
// can tell that it would write its own input only if both are the same object.
const Operand* same_tensor(const Call& call, const Operand& operand) {
  for (const Operand& other : call.operands) {
    if (&other == &operand) break;
    const auto& sizes = operand.geometry.sizes;
    if (other.id == operand.id &&
        ((!other.written && !operand.written) ||
         std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) &&
        other.geometry == operand.geometry && other.geometry.flags == operand.geometry.flags) {
      return &other;
    }
  }
  return nullptr;
}

void put(c10::IValue& argument, uint16_t element, const at::Tensor& tensor) {
  if (argument.isList()) {
    argument.toList().set(element, tensor);
  } else {
    argument = tensor;
  }
}

bool covers_storage(const Slot& slot, const at::Tensor& tensor) {
  return tensor.storage_offset() == 0 && tensor.nbytes() == slot.bytes &&
         tensor.is_non_overlapping_and_dense();
}

// True if the operator overwrites a contiguous part of the storage, and has no other part of it.
bool overwrites_part(const Call& call, const Operand& operand) {
  if (!operand.out || operand.part || !operand.geometry.is_contiguous() ||
      std::find(operand.geometry.sizes.begin(), operand.geometry.sizes.end(), 0) !=
          operand.geometry.sizes.end()) {
    return false;
  }
  return std::count_if(call.operands.begin(), call.operands.end(),
                       [&](const Operand& other) { return other.id == operand.id; }) == 1;
}

}  // namespace

at::Tensor make_tensor(const c10::Storage& storage, const Geometry& geometry) {
  const auto key = c10::computeDispatchKey(geometry.dtype, c10::kStrided, storage.device());
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(geometry.dtype));
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(geometry.sizes, geometry.strides, geometry.offset);
  if (geometry.flags & kWrappedNumber) impl->set_wrapped_number(true);
  if (geometry.flags & kConjugate) tensor._set_conj(true);
  if (geometry.flags & kNegative) tensor._set_neg(true);
  return tensor;
}

std::string Decoder::parse(Reader& in, const Operator& op, uint16_t arguments, Call& call) {
  static const ArgumentType unknown;
  call_ = &call;
  complaint_.clear();
  begin_ = in.remaining();
  if (op.handle && arguments != op.arguments.size()) {
    complaint_ = "internal: " + std::to_string(arguments) + " arguments were sent, " +
                 std::to_string(op.arguments.size()) + " are expected";
  }
  for (uint16_t i = 0; i < arguments; ++i) {
    argument_ = i;
    element_ = 0;
    // The arguments of an unknown operator are still parsed: its outputs follow them.
    call.stack.push_back(value(in, i < op.arguments.size() ? op.arguments[i] : unknown, 0));
    if (!in.ok()) throw CorruptLog("a call ends in the middle of its operands");
  }
  if (!op.handle) {
    const std::string why = complaint_of(op.full_name);
    return op.full_name + (why.empty() ? " does not exist in this torch" : ": " + why);
  }
  return std::move(complaint_);
}

c10::IValue Decoder::complain(Tag tag) {
  if (complaint_.empty()) {
    complaint_ = "internal: argument " + std::to_string(argument_) + " has a value of type " +
                 std::to_string(static_cast<int>(tag)) + ", which it cannot take";
  }
  return {};
}

c10::IValue Decoder::scalar(Reader& in, Tag tag, Kind kind) {
  const bool number = kind == Kind::number;
  if (tag == Tag::integer) {
    const auto value = in.get<int64_t>();
    if (kind == Kind::integer || number) return value;
    if (kind == Kind::real) return static_cast<double>(value);
  } else if (tag == Tag::real) {
    const auto value = in.get<double>();
    if (kind == Kind::real || number) return value;
  } else if (tag == Tag::boolean) {
    const bool value = in.get<uint8_t>() != 0;
    if (kind == Kind::boolean || number) return value;
    if (kind == Kind::integer) return static_cast<int64_t>(value);
  } else {
    const auto real = in.get<double>();
    const auto imaginary = in.get<double>();
    if (kind == Kind::complex || number) return c10::complex<double>(real, imaginary);
  }
  return complain(tag);
}

c10::IValue Decoder::list(Reader& in, Tag tag, const ArgumentType& type, int depth) {
  const size_t item_bytes = tag == Tag::integers || tag == Tag::reals ? 8 : 1;
  const uint32_t count = in.get_count(item_bytes);
  if (depth >= kDepthMax || count > UINT16_MAX) throw CorruptLog("a list without bounds");
  const bool fits = type.kind == Kind::list;
  const ArgumentType element{.kind = type.element,
                             .optional = type.element_optional,
                             .element_type = {},
                             .written = type.written,
                             .changed = type.changed,
                             .out = type.out};
  c10::impl::GenericList items(fits ? type.element_type : c10::TypePtr(c10::AnyType::get()));
  items.reserve(count);
  for (uint32_t i = 0; i < count && in.ok(); ++i) {
    element_ = static_cast<uint16_t>(i);
    if (tag == Tag::list) {
      items.push_back(value(in, element, depth + 1));
    } else {
      items.push_back(scalar(in,
                             tag == Tag::integers ? Tag::integer
                             : tag == Tag::reals  ? Tag::real
                                                  : Tag::boolean,
                             element.kind));
    }
  }
  if (!fits) return complain(tag);
  return items;
}

c10::IValue Decoder::host_tensor(Reader& in) {
  const Geometry geometry = get_geometry(in);
  const uint32_t count = in.get<uint32_t>();
  const auto bytes = in.get_bytes(count);
  if (!in.ok()) return {};
  uint64_t expected = 0;
  if (__builtin_mul_overflow(
          static_cast<uint64_t>(element_count(geometry, state_.limits.elements_max)),
          c10::elementSize(geometry.dtype), &expected) ||
      expected != count || c10::isQIntType(geometry.dtype)) {
    throw CorruptLog("a host tensor whose bytes do not fit its sizes");
  }
  at::Tensor tensor = at::empty(geometry.sizes, at::TensorOptions(geometry.dtype));
  if (count != 0) std::memcpy(tensor.mutable_data_ptr(), bytes.data(), count);
  if (geometry.flags & kWrappedNumber) {
    if (!geometry.sizes.empty()) throw CorruptLog("a number with dimensions");
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return tensor;
}

void Decoder::device_tensor(Reader& in, const ArgumentType& type) {
  Operand operand;
  operand.at = static_cast<uint32_t>(begin_ - in.remaining());
  operand.id = in.get<uint32_t>();
  operand.geometry = get_geometry(in);
  if (!in.ok()) return;
  const Slot& slot = state_.storages.at(operand.id);
  element_count(operand.geometry, state_.limits.elements_max);
  if (slot.life == Slot::Life::live && operand.geometry.storage_bytes() > slot.bytes) {
    throw CorruptLog("a tensor reaches beyond its storage");
  }
  if ((operand.geometry.flags & kWrappedNumber) && !operand.geometry.sizes.empty()) {
    throw CorruptLog("a number with dimensions");
  }
  if (c10::isQIntType(operand.geometry.dtype) && complaint_.empty()) {
    complaint_ = "quantized tensors are not supported";
  }
  operand.argument = argument_;
  operand.element = element_;
  operand.written = type.written;
  operand.changed = type.changed;
  operand.out = type.out;
  call_->operands.push_back(std::move(operand));
}

void Decoder::compound(Reader& in, const ArgumentType& type) {
  CompoundOperand made{argument_, element_, call_->operands.size(), get_compound(in)};
  if (!in.ok()) return;
  int64_t elements = 1;
  for (const int64_t size : made.compound.sizes) {
    if (__builtin_mul_overflow(elements, size, &elements) ||
        elements > state_.limits.elements_max) {
      if (complaint_.empty()) complaint_ = "a sparse tensor of too many elements";
      elements = 0;
    }
  }
  for (size_t i = 0; i < made.compound.parts(); ++i) {
    if (in.get<Tag>() != Tag::tensor) throw CorruptLog("a part of a sparse tensor is missing");
    device_tensor(in, type);
    if (!in.ok()) return;
    Operand& part = call_->operands.back();
    part.part = true;
    part.out = false;  // it is read before it is overwritten
  }
  call_->compounds.push_back(std::move(made));
}

c10::IValue Decoder::value(Reader& in, const ArgumentType& type, int depth) {
  const Tag tag = in.get<Tag>();
  switch (tag) {
    case Tag::none:
      return type.optional || type.kind == Kind::unsupported ? c10::IValue() : complain(tag);
    case Tag::undefined:
      return type.kind == Kind::tensor ? c10::IValue(at::Tensor()) : complain(tag);
    case Tag::tensor:
      device_tensor(in, type);
      return type.kind == Kind::tensor ? c10::IValue(at::Tensor()) : complain(tag);
    case Tag::compound:
      compound(in, type);
      return type.kind == Kind::tensor ? c10::IValue(at::Tensor()) : complain(tag);
    case Tag::host_tensor: {
      c10::IValue tensor = host_tensor(in);
      return type.kind == Kind::tensor ? tensor : complain(tag);
    }
    case Tag::integer:
    case Tag::real:
    case Tag::boolean:
    case Tag::complex: {
      c10::IValue found = scalar(in, tag, type.kind);
      const bool one = type.options == 0 || !found.isInt() ||
                       (found.toInt() >= 0 && found.toInt() < type.options);
      return one ? found : complain(tag);
    }
    case Tag::string: {
      std::string text(in.get_string());
      return type.kind == Kind::string ? c10::IValue(std::move(text)) : complain(tag);
    }
    case Tag::integers:
    case Tag::reals:
    case Tag::booleans:
    case Tag::list:
      return list(in, tag, type, depth);
    case Tag::device: {
      const bool session = in.get<uint8_t>() != 0;
      if (type.kind != Kind::device) return complain(tag);
      return session ? state_.device : c10::Device(c10::DeviceType::CPU);
    }
    case Tag::generator: {
      const uint32_t number = in.get<uint32_t>();
      if (!in.ok() || type.kind != Kind::generator) return complain(tag);
      call_->generators = true;
      return state_.generators.at(number);
    }
    case Tag::alias:
      break;
  }
  throw CorruptLog("a value of an unknown type");
}

void Decoder::materialise(Call& call, std::span<const c10::Storage> storages) {
  for (size_t i = 0; i < call.operands.size(); ++i) {
    Operand& operand = call.operands[i];
    c10::IValue& argument = call.stack[operand.argument];
    const Operand* same = argument.isList() ? nullptr : same_tensor(call, operand);
    operand.tensor = same != nullptr ? same->tensor : make_tensor(storages[i], operand.geometry);
    put(argument, operand.element, operand.tensor);
  }
}

// In a seat.
void Decoder::prepare_changes(Call& call, bool predicted) {
  for (Operand& operand : call.operands) {
    if (!operand.changed) continue;
    Slot& slot = state_.storages.at(operand.id);
    operand.rewrites =
        predicted && overwrites_part(call, operand) && state_.storages.begin_part(slot);
    if (!operand.rewrites) state_.storages.prepare_change(slot);
  }
}

void Decoder::materialise(Call& call, bool predicted) {
  if (state_.storages.replicas()) [[unlikely]]
    prepare_changes(call, predicted);
  for (Operand& operand : call.operands) {
    c10::IValue& argument = call.stack[operand.argument];
    Slot& slot = state_.storages.at(operand.id);
    if (operand.rewrites) [[unlikely]] {
      operand.tensor = make_tensor(slot.held(), operand.geometry);
      put(argument, operand.element, operand.tensor);
      continue;
    }
    operand.fresh |= !(slot.in_memory() || slot.given_up) || slot.life == Slot::Life::lost;
    const Operand* same = argument.isList() ? nullptr : same_tensor(call, operand);
    operand.tensor = same != nullptr ? same->tensor
                                     : make_tensor(state_.storages.use_raw(slot), operand.geometry);
    if (slot.filled < slot.bytes && !(operand.out && covers_storage(slot, operand.tensor))) {
      state_.storages.use(slot);
    }
    if (operand.changed) state_.storages.touch(slot);
    if (!operand.part) put(argument, operand.element, operand.tensor);
  }
  for (const CompoundOperand& made : call.compounds) {
    Parts parts;
    for (size_t i = 0; i < made.compound.parts(); ++i) {
      parts.push_back(call.operands[made.first + i].tensor);
    }
    put(call.stack[made.argument], made.element, assemble(made.compound, parts));
  }
}

}  // namespace sing
