// Shape functions of operators for which torch has none in C++ and which programs with growing
// shapes call for every token. Each returns false for operands of which it is not sure; the worker
// then answers.
#include <cmath>
#include <limits>

#include <ATen/EmptyTensor.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorIterator.h>
#include <ATen/native/TypeProperties.h>

#include "client/ops/operators.h"
#include "client/ops/tensors.h"
#include "client/ops/trust.h"

namespace sing::client {

namespace {

bool all_strided(std::initializer_list<const at::Tensor*> tensors) {
  for (const at::Tensor* tensor : tensors) {
    if (!tensor->defined() || !on_device(*tensor)) return false;
  }
  return true;
}

// True for a type in which norms and attention compute; for other types the worker answers.
bool is_computed(const at::Tensor& tensor) {
  const at::ScalarType type = tensor.scalar_type();
  return type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf;
}

at::Tensor as_meta(const at::Tensor& tensor) {
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

// Output that TensorIterator makes for an elementwise operator.
Output pointwise(std::initializer_list<const at::Tensor*> inputs, at::ScalarType dtype) {
  c10::SmallVector<at::Tensor, 3> metas;
  for (const at::Tensor* input : inputs) metas.push_back(as_meta(*input));
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(false).check_all_same_dtype(false).allow_cpu_scalars(true);
  config.declare_static_dtype_and_device(dtype, at::kMeta);
  config.add_owned_output(at::Tensor());
  for (const at::Tensor& meta : metas) config.add_const_input(meta);
  auto iterator = config.build();
  const at::Tensor& output = iterator.output();
  return tensor_output(dtype, output.sizes(), output.strides());
}

// Plans for an out= operand that is a fresh empty tensor, as torch's composite kernels make it.
bool into_empty(const c10::IValue& out, uint16_t operand, const Output& result, Plan& plan) {
  const at::Tensor& tensor = out.toTensor();
  if (tensor.dim() != 1 || tensor.numel() != 0 || tensor.stride(0) != 1 ||
      tensor.scalar_type() != result.geometry.dtype) {
    return false;
  }
  Change change;
  change.operand = operand;
  change.bytes = result.bytes;
  change.geometry = result.geometry;
  plan.changes.push_back(std::move(change));
  return true;
}

bool relu(Operands operands, Plan& plan) {
  const at::Tensor& self = operands[0].toTensor();
  if (!all_strided({&self}) || self.scalar_type() == at::kBool) return false;
  plan.outputs.push_back(pointwise({&self}, self.scalar_type()));
  return true;
}

bool where(Operands operands, Plan& plan) {
  const at::Tensor& condition = operands[0].toTensor();
  const at::Tensor& self = operands[1].toTensor();
  const at::Tensor& other = operands[2].toTensor();
  if (!all_strided({&condition, &self, &other}) || condition.scalar_type() != at::kBool ||
      self.scalar_type() != other.scalar_type()) {
    return false;
  }
  plan.outputs.push_back(pointwise({&condition, &self, &other}, self.scalar_type()));
  return true;
}

bool logical_not_out(Operands operands, Plan& plan) {
  const at::Tensor& self = operands[0].toTensor();
  if (!all_strided({&self})) return false;
  return into_empty(operands[1], 1, pointwise({&self}, at::kBool), plan);
}

bool logical_binary_out(Operands operands, Plan& plan) {
  const at::Tensor& self = operands[0].toTensor();
  const at::Tensor& other = operands[1].toTensor();
  if (!all_strided({&self, &other})) return false;
  return into_empty(operands[2], 2, pointwise({&self, &other}, at::kBool), plan);
}

bool arange_out(Operands operands, Plan& plan) {
  const at::Tensor& out = operands[3].toTensor();
  if (!out.defined() || !operands[0].isInt() || !operands[1].isInt() || !operands[2].isInt() ||
      !at::isIntegralType(out.scalar_type(), false)) {
    return false;
  }
  const int64_t start = operands[0].toInt(), end = operands[1].toInt(), step = operands[2].toInt();
  if (step == 0 || (step > 0 && start > end) || (step < 0 && start < end) ||
      std::abs(start) > (int64_t{1} << 52) || std::abs(end) > (int64_t{1} << 52)) {
    return false;  // the worker raises torch's own error
  }
  const int64_t count =
      static_cast<int64_t>(std::ceil(static_cast<double>(end - start) / static_cast<double>(step)));
  return into_empty(operands[3], 3, contiguous_output(out.scalar_type(), {count}), plan);
}

bool index_select(Operands operands, Plan& plan) {
  const at::Tensor& self = operands[0].toTensor();
  const int64_t dim = operands[1].toInt();
  const at::Tensor& index = operands[2].toTensor();
  if (!all_strided({&self, &index}) || self.dim() == 0 || index.dim() != 1 || dim < -self.dim() ||
      dim >= self.dim() || !at::isIntegralType(index.scalar_type(), false)) {
    return false;
  }
  Dimensions sizes(self.sizes().begin(), self.sizes().end());
  sizes[static_cast<size_t>(dim < 0 ? dim + self.dim() : dim)] = index.numel();
  plan.outputs.push_back(contiguous_output(self.scalar_type(), sizes));
  return true;
}

bool native_dropout(Operands operands, Plan& plan) {
  const at::Tensor& self = operands[0].toTensor();
  if (!all_strided({&self}) || !self.is_contiguous() || !at::isFloatingType(self.scalar_type())) {
    return false;
  }
  plan.outputs.push_back(contiguous_output(self.scalar_type(), self.sizes()));
  plan.outputs.push_back(contiguous_output(at::kBool, self.sizes()));
  return true;
}

// The type of a norm's statistics: that of the input, or, for the 16-bit types, the type in which
// the device computes. A CPU does so only if the parameters are of that type.
at::ScalarType statistics_type(Operands operands) {
  const at::ScalarType type = operands[0].toTensor().scalar_type();
  if (!c10::isReducedFloatingType(type)) return type;
  const bool software = Session::get().software();
  const auto wider = [&](const c10::IValue& parameter) {
    return parameter.isTensor() && parameter.toTensor().defined() &&
           parameter.toTensor().scalar_type() != type;
  };
  return !software || wider(operands[2]) || wider(operands[3]) ? at::kFloat : type;
}

bool native_layer_norm(Operands operands, Plan& plan) {
  const at::Tensor& input = operands[0].toTensor();
  const auto normalized = operands[1].toListRef();
  const auto axis = input.dim() - static_cast<int64_t>(normalized.size());
  if (!all_strided({&input}) || axis < 0 || normalized.empty() || !is_computed(input)) {
    return false;
  }
  for (size_t i = 0; i < normalized.size(); ++i) {
    if (!normalized[i].isInt() ||
        normalized[i].toInt() != input.size(axis + static_cast<int64_t>(i))) {
      return false;
    }
  }
  for (const c10::IValue& parameter : {operands[2], operands[3]}) {
    const at::Tensor tensor = parameter.isTensor() ? parameter.toTensor() : at::Tensor();
    if (tensor.defined() && tensor.sizes() != input.sizes().slice(static_cast<size_t>(axis))) {
      return false;
    }
  }
  Dimensions statistics(input.sizes().begin(), input.sizes().end());
  for (int64_t i = axis; i < input.dim(); ++i) statistics[static_cast<size_t>(i)] = 1;
  plan.outputs.push_back(contiguous_output(input.scalar_type(), input.sizes()));
  const at::ScalarType type = statistics_type(operands);
  plan.outputs.push_back(contiguous_output(type, statistics));
  plan.outputs.push_back(contiguous_output(type, statistics));
  return true;
}

// The result has the layout of the query, the statistics have (batch, sequence, heads).
bool flash_attention_for_cpu(Operands operands, Plan& plan) {
  const at::Tensor& query = operands[0].toTensor();
  if (!all_strided({&query}) || query.dim() != 4 || !is_computed(query)) {
    return false;
  }
  const int64_t batch = query.size(0), heads = query.size(1), rows = query.size(2);
  plan.outputs.push_back(pointwise({&query}, query.scalar_type()));
  plan.outputs.push_back(tensor_output(at::toOpMathType(query.scalar_type()), {batch, heads, rows},
                                       {rows * heads, 1, heads}));
  return true;
}

bool multinomial(Operands operands, Plan& plan) {
  const at::Tensor& self = operands[0].toTensor();
  if (!all_strided({&self}) || (self.dim() != 1 && self.dim() != 2) || !operands[1].isInt() ||
      operands[1].toInt() <= 0 || operands[2].toBool() || operands[1].toInt() > self.size(-1) ||
      !at::isFloatingType(self.scalar_type())) {
    return false;
  }
  Dimensions sizes;
  if (self.dim() == 2) sizes.push_back(self.size(0));
  sizes.push_back(operands[1].toInt());
  plan.outputs.push_back(contiguous_output(at::kLong, sizes));
  return true;
}

bool foreach_norm(Operands operands, Plan& plan) {
  Output list;
  list.tag = Tag::list;
  for (const c10::IValue& item : operands[0].toListRef()) {
    const at::Tensor& tensor = item.toTensor();
    if (!all_strided({&tensor}) || !at::isFloatingType(tensor.scalar_type()) ||
        !operands[2].isNone()) {
      return false;
    }
    list.items.push_back(contiguous_output(tensor.scalar_type(), {}));
  }
  plan.outputs.push_back(std::move(list));
  return true;
}

}  // namespace

}  // namespace sing::client

// The row of an operator: one for each rule.
#define ON_CLIENT(function) &sing::client::function
#define ON_WORKER(function) nullptr
#include "ops/table.h"

namespace sing::client {

const Table& table() {
  static const Table all(kRows);
  return all;
}

Row row_of(std::string_view full_name) { return table().find(full_name); }

}  // namespace sing::client
