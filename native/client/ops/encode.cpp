#include "client/ops/encode.h"

#include <c10/core/GradMode.h>

#include "client/torch/generators.h"
#include "oplog/compound.h"

namespace sing::client {

void Encoder::begin(Operator& op) {
  op_ = &op;
  record_.clear();
  key_.clear();
  tensors_.clear();
  let_go();
  has_mask_ = false;
  record_.put<uint32_t>(op.number());
  record_.put<uint16_t>(static_cast<uint16_t>(op.operands));
  record_.put<uint16_t>(static_cast<uint16_t>(op.returns));
  flags_ = c10::GradMode::is_enabled() ? kGradients : 0;
  key_.put<const void*>(&op.schema);
  key_.put<uint8_t>(flags_);
  key_.put<uint32_t>(Session::settings_number());
}

void Encoder::call(Operator& op, c10::ArrayRef<c10::IValue> operands) {
  begin(op);
  for (size_t i = 0; i < operands.size(); ++i) value(operands[i], op.relevance[i]);
}

void Encoder::add(const at::ITensorListRef& operand, Relevance) {
  both(Tag::list);
  both(static_cast<uint32_t>(operand.size()));
  for (const at::Tensor& item : operand) tensor(item);
}

void Encoder::tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    both(Tag::undefined);
    return;
  }
  if (!on_device(tensor)) {
    host_tensor(tensor);
    return;
  }
  if (tensor.layout() != at::kStrided) {
    compound(tensor);
    return;
  }
  both(Tag::tensor);
  record_.put<uint32_t>(slot_of(tensor)->id);
  put_geometries(tensor.scalar_type(), tensor.sizes(), tensor.strides(), tensor.storage_offset(),
                 tensor_flags(tensor), record_, key_);
  tensors_.push_back(&tensor);
  const auto dtype = tensor.scalar_type();
  has_mask_ = has_mask_ || dtype == at::kBool || dtype == at::kByte;
}

void Encoder::host_tensor(const at::Tensor& tensor) {
  // Larger tensors were moved or refused before (calls.cpp); numbers are sent in the record.
  const at::Tensor bytes = tensor.contiguous().resolve_conj().resolve_neg();
  both(Tag::host_tensor);
  put_geometries(bytes.scalar_type(), bytes.sizes(), bytes.strides(), 0,
                 static_cast<uint8_t>(tensor_flags(tensor) & kWrappedNumber), record_, key_);
  record_.put<uint32_t>(static_cast<uint32_t>(bytes.nbytes()));
  record_.put_bytes(bytes.const_data_ptr(), bytes.nbytes());
}

void Encoder::compound(const at::Tensor& tensor) {
  const Compound compound = compound_of(tensor);
  both(Tag::compound);
  const size_t at = record_.size();
  put_compound(record_, compound);
  key_.put_bytes(record_.view().data() + at, record_.size() - at);
  for (at::Tensor& part : parts_of(tensor)) {
    parts_.push_back(std::move(part));
    this->tensor(parts_.back());
  }
}

void Encoder::list(const c10::IValue& value) {
  const auto items = value.toListRef();
  const auto count = static_cast<uint32_t>(items.size());
  if (value.isIntList() || value.isSymIntList()) {
    both(Tag::integers);
    both(count);
    for (const auto& item : items) {
      both<int64_t>(item.isInt() ? item.toInt() : item.toSymInt().guard_int(__FILE__, __LINE__));
    }
  } else if (value.isDoubleList()) {
    both(Tag::reals);
    both(count);
    for (const auto& item : items) both<double>(item.toDouble());
  } else if (value.isBoolList()) {
    both(Tag::booleans);
    both(count);
    for (const auto& item : items) both<uint8_t>(item.toBool());
  } else {
    both(Tag::list);
    both(count);
    for (const auto& item : items) this->value(item, Relevance::type_only);
  }
}

void Encoder::value(const c10::IValue& value, Relevance relevance) {
  const bool keyed = relevance == Relevance::value;
  if (value.isTensor()) {
    tensor(value.toTensor());
  } else if (value.isNone()) {
    both(Tag::none);
  } else if (value.isInt()) {
    both(Tag::integer);
    record_.put<int64_t>(value.toInt());
    if (keyed) key_.put<int64_t>(value.toInt());
  } else if (value.isDouble()) {
    both(Tag::real);
    record_.put<double>(value.toDouble());
    if (keyed) key_.put<double>(value.toDouble());
  } else if (value.isBool()) {
    both(Tag::boolean);
    both<uint8_t>(value.toBool());
  } else if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    both(Tag::complex);
    record_.put<double>(number.real());
    record_.put<double>(number.imag());
  } else if (value.isSymInt()) {
    both(Tag::integer);
    both<int64_t>(value.toSymInt().guard_int(__FILE__, __LINE__));
  } else if (value.isString()) {
    const auto& text = value.toStringRef();
    both(Tag::string);
    record_.put_string(text);
    key_.put_string(text);
  } else if (value.isDevice()) {
    both(Tag::device);
    both<uint8_t>(value.toDevice().type() == kDevice);
  } else if (value.isGenerator()) {
    const auto& generator = value.toGenerator();
    if (!generator.defined()) {
      both(Tag::none);
    } else {
      both(Tag::generator);
      record_.put<uint32_t>(generator_number(generator));
    }
  } else if (value.isList()) {
    list(value);
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(false, op_->name, ": an operand of type ", value.tagKind(),
                                " cannot be sent to a proxied device");
  }
}

}  // namespace sing::client
