// Small operators are executed by one thread, and give the bytes of all threads together.
#include "worker/exec/alone.h"

#include <ATen/Parallel.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gt.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/native_layer_norm.h>

#include <cstring>
#include <random>

#include "tests/check.h"

using namespace sing;

namespace {

class TwoThreads {
 public:
  TwoThreads() : before_(at::get_num_threads()) { use_threads(2); }
  ~TwoThreads() { use_threads(before_); }
  TwoThreads(const TwoThreads&) = delete;
  TwoThreads& operator=(const TwoThreads&) = delete;

 private:
  int before_;
};

// All different, and of many magnitudes, so that the order of additions matters.
at::Tensor numbers(at::IntArrayRef sizes) {
  return at::arange(c10::multiply_integers(sizes), at::kFloat).mul_(0.7).sin_().mul_(3).view(sizes);
}

Operator named(const std::string& name) {
  Operators operators(true, nullptr);
  operators.define(1, "aten::" + name, "");
  return operators.at(1);
}

// True if a call that makes one tensor is small.
bool small(const Operator& op, std::initializer_list<at::Tensor> tensors, at::IntArrayRef result) {
  Call call;
  for (const at::Tensor& tensor : tensors) {
    Operand operand;
    operand.geometry.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
    call.operands.push_back(operand);
  }
  ExpectedReturns expected;
  expected.items.emplace_back();
  expected.items[0].kind = Expected::Kind::tensor;
  expected.items[0].geometry.sizes.assign(result.begin(), result.end());
  return is_small(op, call, expected);
}

}  // namespace

TEST(who_is_alone_has_no_helpers_and_has_them_again) {
  const TwoThreads two;
  {
    const Alone alone(true);
    EXPECT(at::get_num_threads() == 1);
    const Alone again(true);
    EXPECT(at::get_num_threads() == 1);
  }
  EXPECT(at::get_num_threads() == 2);
  const Alone not_really(false);
  EXPECT(at::get_num_threads() == 2);
}

TEST(sizes_and_operators_decide_who_is_alone) {
  const at::Tensor matrix = numbers({32, 32}), batch = numbers({8, 32}), vast = at::empty({1});
  const Operator mm = named("mm");
  EXPECT(small(mm, {matrix, matrix}, {32, 32}));
  EXPECT(!small(mm, {batch, matrix}, {8, 32}));
  EXPECT(!small(mm, {numbers({256, 256}), numbers({256, 64})}, {256, 64}));
  EXPECT(!small(mm, {numbers({4096, 1}), numbers({1, 4096})}, {4096, 4096}));
  EXPECT(!small(mm, {vast.expand({int64_t{1} << 40, 1 << 20})}, {1}));
  EXPECT(small(named("native_layer_norm"), {batch, numbers({32}), numbers({32})}, {8, 32}));
  EXPECT(small(named("tanh"), {numbers({300, 300})}, {300, 300}));
  EXPECT(!small(named("tanh"), {numbers({400, 400})}, {400, 400}));
  EXPECT(!small(named("convolution_backward"), {matrix}, {32, 32}));
  Operators of_gpus(false, nullptr);
  of_gpus.define(1, "aten::mm", "");
  EXPECT(!small(of_gpus.at(1), {matrix, matrix}, {32, 32}));
}

TEST(with_more_threads_than_two_less_is_small) {
  const int before = at::get_num_threads();
  const at::Tensor one = numbers({100, 100});
  for (const int threads : {2, 4}) {
    use_threads(threads);
    EXPECT(small(named("mm"), {one, one}, {100, 100}) == (threads == 2));
  }
  use_threads(before);
}

TEST(products_have_the_same_bytes_whoever_computes_them) {
  const TwoThreads two;
  const Operator mm = named("mm"), addmm = named("addmm"), bmm = named("bmm");
  const Operator softmax = named("_log_softmax");
  const Operator softmax_backward = named("_log_softmax_backward_data");
  std::mt19937 chance(7);
  const auto size = [&] { return static_cast<int64_t>(1 + chance() % 200); };
  int compared = 0;
  const auto compare = [&](bool really, const auto& product) {
    if (!really) return;
    const at::Tensor together = product();
    const Alone alone(true);
    EXPECT(product().equal(together));
    ++compared;
  };
  for (int i = 0; i < 2000; ++i) {
    const int64_t rows = size(), inner = size(), columns = size(), many = 1 + i % 4;
    at::Tensor one = numbers({rows, inner}), other = numbers({inner, columns});
    if (i & 1) one = numbers({inner, rows}).t();
    if (i & 2) other = numbers({columns, inner}).t();
    const at::Tensor bias = numbers({columns});
    compare(small(mm, {one, other}, {rows, columns}), [&] { return at::mm(one, other); });
    compare(small(addmm, {bias, one, other}, {rows, columns}),
            [&] { return at::addmm(bias, one, other); });
    const at::Tensor ones = numbers({many, rows, inner}), others = numbers({many, inner, columns});
    const at::Tensor likely = at::_log_softmax(one, 1, false);
    compare(small(softmax, {one}, {rows, inner}), [&] { return at::_log_softmax(one, 1, false); });
    compare(small(softmax_backward, {one, likely}, {rows, inner}),
            [&] { return at::_log_softmax_backward_data(one, likely, 1, at::kFloat); });
    compare(small(bmm, {ones, others}, {many, rows, columns}),
            [&] { return at::bmm(ones, others); });
  }
  EXPECT(compared > 1000);
}

// The start of a thread's share may be at any element.
TEST(pointwise_operators_have_the_same_bytes_whoever_computes_them) {
  const TwoThreads two;
  const at::Tensor many = numbers({98'250}), across = numbers({393, 250}).t();
  const at::Tensor apart = numbers({250, 786}).slice(1, 0, 786, 2);
  int compared = 0;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    Operators operators(true, nullptr);
    operators.define(1, name.name, name.overload_name);
    const Operator& op = operators.at(1);
    if (op.sharing != Sharing::elements) continue;
    for (const at::Tensor& tensor : {many, across, apart}) {
      const auto run = [&] {
        torch::jit::Stack stack;
        for (const c10::Argument& argument : op.handle->schema().arguments()) {
          if (argument.name() == "condition") {
            stack.emplace_back(at::gt(tensor, 0.5));
          } else if (argument.type()->kind() == c10::TypeKind::TensorType) {
            stack.emplace_back(tensor.clone());
          } else {
            stack.push_back(argument.default_value().value_or(c10::Scalar(0.7)));
          }
        }
        op.handle->callBoxed(&stack);
        return stack[0].toTensor();
      };
      at::Tensor together;
      try {
        together = run();
      } catch (const c10::Error&) {
        break;  // some overloads are for other operands
      }
      const Alone alone(true);
      const at::Tensor by_one = run();
      EXPECT(by_one.strides() == together.strides());
      EXPECT(std::memcmp(by_one.data_ptr(), together.data_ptr(), together.nbytes()) == 0);
      ++compared;
    }
  }
  EXPECT(compared > 3 * 23);
}

TEST(norms_have_the_same_bytes_whoever_computes_them) {
  const TwoThreads two;
  const Operator norm = named("native_layer_norm");
  std::mt19937 chance(8);
  const auto size = [&](int64_t most) { return static_cast<int64_t>(1 + chance() % most); };
  int compared = 0;
  for (int i = 0; i < 1000; ++i) {
    const int64_t width = size(300);
    const at::Tensor rows = numbers({size(200), width});
    const at::Tensor weight = numbers({width}), bias = weight.cos();
    if (!small(norm, {rows, weight, bias}, rows.sizes())) continue;
    const auto normalize = [&] { return at::native_layer_norm(rows, {width}, weight, bias, 1e-5); };
    const auto together = normalize();
    const Alone alone(true);
    const auto by_one = normalize();
    EXPECT(std::get<0>(by_one).equal(std::get<0>(together)));
    EXPECT(std::get<1>(by_one).equal(std::get<1>(together)));
    EXPECT(std::get<2>(by_one).equal(std::get<2>(together)));
    ++compared;
  }
  EXPECT(compared > 500);
}
