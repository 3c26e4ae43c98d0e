// Shape rules: each against what a worker returns for CPU tensors of the same geometry: torch's own
// operator, or its substitute.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "client/ops/operators.h"
#include "client/ops/plans.h"
#include "client/ops/tensors.h"
#include "tests/check.h"
#include "tests/client/device.h"
#include "worker/operators/substitutes.h"

using namespace sing;
using namespace sing::test;

namespace {

using client::Plan;
using Calls = std::vector<std::vector<c10::IValue>>;

const std::vector<at::ScalarType> kReal = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};
const std::vector<at::ScalarType> kTypes = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf,
                                            at::kLong,  at::kInt,    at::kByte};

at::Tensor ones(std::vector<int64_t> sizes, at::ScalarType type = at::kFloat) {
  return at::ones(sizes, at::TensorOptions().dtype(type));
}

at::Tensor empty(at::ScalarType type) { return at::empty({0}, at::TensorOptions().dtype(type)); }

// Tensors of several shapes, each with several strides.
std::vector<at::Tensor> shapes(at::ScalarType type) {
  return {ones({}, type),
          ones({1}, type),
          ones({5}, type),
          ones({0}, type),
          ones({3, 4}, type),
          ones({3, 0, 2}, type),
          ones({2, 3, 4}, type),
          ones({4, 3}, type).t(),
          ones({2, 3, 4}, type).permute({2, 0, 1}),
          ones({3, 1}, type).expand({3, 4}),
          ones({6, 8}, type).slice(0, 0, 6, 2).slice(1, 1, 8, 3),
          ones({2, 3, 4, 5}, type).contiguous(at::MemoryFormat::ChannelsLast)};
}

Calls unary(const std::vector<at::ScalarType>& types) {
  Calls calls;
  for (const at::ScalarType type : types) {
    for (const at::Tensor& self : shapes(type)) calls.push_back({self});
  }
  return calls;
}

// Pairs that can be broadcast.
std::vector<std::pair<at::Tensor, at::Tensor>> pairs(at::ScalarType one, at::ScalarType other) {
  return {{ones({3, 4}, one), ones({3, 4}, other)},
          {ones({3, 4}, one), ones({4}, other)},
          {ones({3, 1}, one), ones({1, 4}, other)},
          {ones({4, 3}, one).t(), ones({4, 3}, other).t()},
          {ones({4, 3}, one).t(), ones({3, 4}, other)},
          {ones({2, 3, 4}, one).permute({2, 0, 1}), ones({4, 2, 3}, other)},
          {ones({}, one), ones({2, 2}, other)},
          {ones({0, 3}, one), ones({1, 3}, other)},
          {ones({2, 3, 4, 5}, one).contiguous(at::MemoryFormat::ChannelsLast),
           ones({2, 3, 4, 5}, other).contiguous(at::MemoryFormat::ChannelsLast)}};
}

Calls where() {
  Calls calls;
  for (const at::ScalarType type : kTypes) {
    for (const auto& [one, other] : pairs(type, type)) {
      calls.push_back({ones({}, at::kBool), one, other});
      calls.push_back({one.to(at::kBool), one, other});
      calls.push_back({other.to(at::kBool), one, other});
    }
  }
  return calls;
}

Calls logical() {
  Calls calls;
  for (const at::ScalarType type : kTypes) {
    for (const auto& [one, other] : pairs(type, at::kFloat)) {
      calls.push_back({one, other, empty(at::kBool)});
    }
  }
  return calls;
}

Calls logical_not() {
  Calls calls = unary(kTypes);
  for (auto& call : calls) call.emplace_back(empty(at::kBool));
  return calls;
}

Calls arange() {
  Calls calls;
  for (const at::ScalarType type : {at::kLong, at::kInt, at::kShort}) {
    for (const auto& [start, end, step] : std::vector<std::array<int64_t, 3>>{
             {0, 5, 1}, {0, 0, 1}, {2, 9, 3}, {9, 2, -2}, {-3, 3, 2}, {0, 1000, 999}}) {
      calls.push_back({start, end, step, empty(type)});
    }
  }
  return calls;
}

Calls index_select() {
  Calls calls;
  for (const at::ScalarType type : kTypes) {
    for (const at::Tensor& self : shapes(type)) {
      for (int64_t dim = -self.dim(); dim < self.dim(); ++dim) {
        if (self.size(dim) == 0) continue;
        for (const at::ScalarType index : {at::kLong, at::kInt}) {
          calls.push_back({self, dim, at::zeros({3}, index)});
          calls.push_back({self, dim, at::zeros({0}, index)});
        }
      }
    }
  }
  return calls;
}

Calls dropout() {
  Calls calls;
  for (const at::ScalarType type : kReal) {
    for (const at::Tensor& self : shapes(type)) {
      for (const bool train : {true, false}) calls.push_back({self, 0.5, train});
    }
  }
  return calls;
}

Calls layer_norm() {
  Calls calls;
  for (const at::ScalarType type : kReal) {
    for (const at::ScalarType parameters : {type, at::kFloat}) {
      if (type == at::kDouble && parameters != type) continue;  // torch refuses that
      for (const at::Tensor& input :
           {ones({3, 4}, type), ones({2, 3, 4}, type), ones({0, 4}, type), ones({4, 3}, type).t(),
            ones({4, 2, 3}, type).permute({1, 2, 0})}) {
        const at::Tensor weight = ones({4}, parameters);
        calls.push_back({input, std::vector<int64_t>{4}, weight, weight, 1e-5});
        calls.push_back({input, std::vector<int64_t>{4}, weight, c10::IValue(), 1e-5});
        calls.push_back({input, std::vector<int64_t>{4}, c10::IValue(), c10::IValue(), 1e-5});
      }
      const at::Tensor wide = ones({3, 4}, parameters);
      calls.push_back({ones({2, 3, 4}, type), std::vector<int64_t>{3, 4}, wide, wide, 1e-5});
    }
  }
  return calls;
}

Calls attention() {
  Calls calls;
  for (const at::ScalarType type : kReal) {
    for (const bool causal : {true, false}) {
      for (const at::Tensor& query : {ones({2, 3, 5, 8}, type), ones({1, 1, 1, 4}, type),
                                      ones({2, 5, 3, 8}, type).transpose(1, 2)}) {
        calls.push_back({query, query, query, 0.0, causal, c10::IValue(), c10::IValue()});
      }
      calls.push_back({ones({2, 3, 4, 8}, type), ones({2, 3, 7, 8}, type), ones({2, 3, 7, 8}, type),
                       0.0, false, c10::IValue(), 0.5});
    }
  }
  return calls;
}

Calls multinomial() {
  Calls calls;
  for (const at::ScalarType type : kReal) {
    for (const at::Tensor& self : {ones({5}, type), ones({3, 5}, type), ones({5, 3}, type).t()}) {
      calls.push_back({self, 1, false, c10::IValue()});
      calls.push_back({self, 3, false, c10::IValue()});
    }
  }
  return calls;
}

Calls foreach_norm() {
  Calls calls;
  for (const at::ScalarType type : kReal) {
    for (const int64_t order : {1, 2}) {
      calls.push_back({std::vector<at::Tensor>{ones({3, 4}, type), ones({}, type)},
                       at::Scalar(order), c10::IValue()});
    }
  }
  return calls;
}

// For each operator with a rule: calls that the rule has to know.
const std::map<std::string_view, Calls (*)()> kKnown = {
    {"aten::relu", [] { return unary(kTypes); }},
    {"aten::where.self", &where},
    {"aten::logical_not.out", &logical_not},
    {"aten::logical_and.out", &logical},
    {"aten::logical_or.out", &logical},
    {"aten::logical_xor.out", &logical},
    {"aten::arange.start_out", &arange},
    {"aten::index_select", &index_select},
    {"aten::native_dropout", &dropout},
    {"aten::native_layer_norm", &layer_norm},
    {"aten::_scaled_dot_product_flash_attention_for_cpu", &attention},
    {"aten::multinomial", &multinomial},
    {"aten::_foreach_norm.Scalar", &foreach_norm},
};

// Of these, the rule of dropout leaves those whose results are not contiguous to the worker, and
// that of index_select numbers.
bool may_decline(std::string_view name, const std::vector<c10::IValue>& call) {
  if (name == "aten::native_dropout") return !call[0].toTensor().is_contiguous();
  return name == "aten::index_select" && call[0].toTensor().dim() == 0;
}

const c10::IValue kNone;

// Calls that a rule must not answer: torch raises an error, or the result does not follow from the
// geometry alone.
const std::map<std::string_view, Calls (*)()> kDeclined = {
    {"aten::relu", [] { return Calls{{ones({2}, at::kBool)}}; }},
    {"aten::where.self",
     [] {
       const at::Tensor one = ones({2}), mask = ones({2}, at::kBool);
       return Calls{{one, one, one}, {mask, one, ones({2}, at::kDouble)}};
     }},
    {"aten::logical_not.out",
     [] {
       return Calls{{ones({2}), empty(at::kFloat)},         // converts
                    {ones({2}), ones({2}, at::kBool)},      // writes into its memory
                    {ones({2}), ones({0, 2}, at::kBool)}};  // resized with torch's warning
     }},
    {"aten::logical_and.out", [] { return Calls{{ones({2}), ones({2}), empty(at::kInt)}}; }},
    {"aten::logical_or.out", [] { return Calls{{ones({2}), ones({2}), empty(at::kInt)}}; }},
    {"aten::logical_xor.out", [] { return Calls{{ones({2}), ones({2}), empty(at::kInt)}}; }},
    {"aten::arange.start_out",
     [] {
       return Calls{{0, 5, 0, empty(at::kLong)},    {5, 0, 1, empty(at::kLong)},
                    {0, 5, -1, empty(at::kLong)},   {0.5, 5, 1, empty(at::kLong)},
                    {0, 5, 1, empty(at::kFloat)},   {0, int64_t{1} << 53, 1, empty(at::kLong)},
                    {0, 5, 1, ones({5}, at::kLong)}};
     }},
    {"aten::index_select",
     [] {
       const at::Tensor self = ones({3, 4}), index = ones({2}, at::kLong);
       return Calls{{self, 2, index},
                    {self, -3, index},
                    {self, 0, ones({2, 2}, at::kLong)},
                    {self, 0, ones({2})},
                    {ones({}), 0, index}};
     }},
    {"aten::native_dropout",
     [] { return Calls{{ones({2, 3}).t(), 0.5, true}, {ones({2}, at::kLong), 0.5, true}}; }},
    {"aten::native_layer_norm",
     [] {
       const at::Tensor input = ones({3, 4}), weight = ones({4});
       return Calls{{input, std::vector<int64_t>{3}, kNone, kNone, 1e-5},
                    {input, std::vector<int64_t>{}, kNone, kNone, 1e-5},
                    {input, std::vector<int64_t>{2, 3, 4}, kNone, kNone, 1e-5},
                    {input, std::vector<int64_t>{4}, ones({3}), kNone, 1e-5},
                    {input, std::vector<int64_t>{4}, weight, ones({3}), 1e-5},
                    {ones({3, 4}, at::kLong), std::vector<int64_t>{4}, kNone, kNone, 1e-5}};
     }},
    {"aten::_scaled_dot_product_flash_attention_for_cpu",
     [] {
       const at::Tensor flat = ones({3, 5, 8}), whole = ones({2, 3, 5, 8}, at::kLong);
       return Calls{{flat, flat, flat, 0.0, false, kNone, kNone},
                    {whole, whole, whole, 0.0, false, kNone, kNone}};
     }},
    {"aten::multinomial",
     [] {
       return Calls{{ones({5}), 0, false, kNone},
                    {ones({5}), 6, false, kNone},
                    {ones({5}), 2, true, kNone},
                    {ones({1, 2, 3}), 1, false, kNone},
                    {ones({5}, at::kLong), 1, false, kNone}};
     }},
    {"aten::_foreach_norm.Scalar",
     [] {
       return Calls{
           {std::vector<at::Tensor>{ones({2}, at::kLong)}, at::Scalar(2), kNone},
           {std::vector<at::Tensor>{ones({2})}, at::Scalar(2), static_cast<int64_t>(at::kDouble)}};
     }},
};

std::string text_of(std::string_view name, const std::vector<c10::IValue>& call) {
  std::ostringstream out;
  out << name;
  for (const c10::IValue& operand : call) {
    if (!operand.isTensor() || !operand.toTensor().defined()) continue;
    const at::Tensor& tensor = operand.toTensor();
    out << " " << tensor.scalar_type() << tensor.sizes() << tensor.strides();
  }
  return out.str();
}

void expect_same(const client::Output& planned, const c10::IValue& result,
                 const std::string& text) {
  if (planned.tag == Tag::list) {
    const auto tensors = result.toTensorVector();
    EXPECT_EQ(planned.items.size(), tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) expect_same(planned.items[i], tensors[i], text);
    return;
  }
  EXPECT(planned.tag == Tag::tensor);
  const at::Tensor& tensor = result.toTensor();
  if (!(planned.geometry == client::geometry_of(tensor)) ||
      planned.bytes < planned.geometry.storage_bytes()) {
    std::ostringstream out;
    out << text << ": planned " << planned.geometry.dtype
        << c10::IntArrayRef(planned.geometry.sizes) << c10::IntArrayRef(planned.geometry.strides)
        << ", torch returns " << tensor.scalar_type() << tensor.sizes() << tensor.strides();
    fail(__FILE__, __LINE__, out.str());
  }
}

c10::OperatorHandle operator_of(std::string_view name) {
  const size_t dot = name.find('.');
  return c10::Dispatcher::singleton().findSchemaOrThrow(
      std::string(name.substr(0, dot)).c_str(),
      dot == std::string_view::npos ? "" : std::string(name.substr(dot + 1)).c_str());
}

// Compares what the rule plans with what torch does.
void compare(const Row& row, const std::vector<c10::IValue>& call) {
  const std::string text = text_of(row.name, call);
  Plan plan;
  if (!row.shape(twins(call), plan)) {
    if (!may_decline(row.name, call)) fail(__FILE__, __LINE__, "not known: " + text);
    return;
  }
  torch::jit::Stack stack = call;
  // On a software device the worker may have a substitute.
  if (const Substitute substitute = sing::row_of(row.name).substitute; substitute != nullptr) {
    substitute(stack);
  } else {
    operator_of(row.name).callBoxed(stack);
  }
  for (size_t i = 0; i < plan.outputs.size(); ++i) expect_same(plan.outputs[i], stack[i], text);
  for (const client::Change& change : plan.changes) {
    client::Output output;
    output.tag = Tag::tensor;
    output.geometry = change.geometry;
    output.bytes = change.bytes;
    expect_same(output, call[change.operand], text);
  }
  EXPECT(plan.outputs.size() + plan.changes.size() == stack.size());
}

}  // namespace

TEST(each_shape_rule_plans_what_torch_returns) {
  const c10::NoGradGuard no_grad;
  size_t rules = 0;
  for (const Row& row : client::table().rows()) {
    if (row.shape == nullptr) continue;
    ++rules;
    const auto known = kKnown.find(row.name);
    if (known == kKnown.end()) fail(__FILE__, __LINE__, "no calls for " + std::string(row.name));
    for (const auto& call : known->second()) compare(row, call);
  }
  EXPECT_EQ(rules, kKnown.size());
}

TEST(shape_rules_decline_what_they_do_not_know) {
  size_t rules = 0;
  for (const Row& row : client::table().rows()) {
    if (row.shape == nullptr) continue;
    ++rules;
    const auto declined = kDeclined.find(row.name);
    if (declined == kDeclined.end()) {
      fail(__FILE__, __LINE__, "no declined calls for " + std::string(row.name));
    }
    for (const auto& call : declined->second()) {
      Plan plan;
      if (row.shape(twins(call), plan)) {
        fail(__FILE__, __LINE__, "planned: " + text_of(row.name, call));
      }
    }
  }
  EXPECT_EQ(rules, kDeclined.size());
}

TEST(shape_rules_leave_tensors_of_the_host_to_the_worker) {
  const at::Tensor host = ones({2});
  Plan plan;
  EXPECT(!client::row_of("aten::relu").shape(std::vector<c10::IValue>{host}, plan));
}
