// Small operators are executed by one thread, and give the bytes of all threads together.
#include "worker/alone.h"

#include <ATen/Parallel.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <random>

#include "tests/check.h"

using namespace sing;

namespace {

class TwoThreads {
 public:
  TwoThreads() : before_(at::get_num_threads()) { at::set_num_threads(2); }
  ~TwoThreads() { at::set_num_threads(before_); }
  TwoThreads(const TwoThreads&) = delete;
  TwoThreads& operator=(const TwoThreads&) = delete;

 private:
  int before_;
};

// All different, and of many magnitudes, so that the order in which they are added up matters.
at::Tensor numbers(at::IntArrayRef sizes) {
  return at::arange(c10::multiply_integers(sizes), at::kFloat).mul_(0.7).sin_().mul_(3).view(sizes);
}

Operator named(const std::string& name) {
  Operators operators(true, nullptr);
  operators.define(1, "aten::" + name, "");
  return operators.at(1);
}

Call of(std::initializer_list<at::Tensor> tensors) {
  Call call;
  for (const at::Tensor& tensor : tensors) {
    Operand operand;
    operand.geometry.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
    call.operands.push_back(operand);
  }
  return call;
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
  const at::Tensor matrix = numbers({32, 32}), batch = numbers({8, 32});
  EXPECT(is_small(named("mm"), of({matrix, matrix})));
  EXPECT(!is_small(named("mm"), of({batch, matrix})));
  EXPECT(!is_small(named("mm"), of({numbers({64, 256}), numbers({256, 64})})));
  EXPECT(!is_small(named("convolution_backward"), of({matrix})));
  EXPECT(!is_small(named("mm"), of({at::empty({1}).expand({int64_t{1} << 40, 1 << 20})})));
  Operators of_gpus(false, nullptr);
  of_gpus.define(1, "aten::mm", "");
  EXPECT(!is_small(of_gpus.at(1), of({matrix, matrix})));
}

TEST(products_have_the_same_bytes_whoever_computes_them) {
  const TwoThreads two;
  const Operator mm = named("mm"), addmm = named("addmm"), bmm = named("bmm");
  const Operator softmax = named("_log_softmax");
  const Operator softmax_backward = named("_log_softmax_backward_data");
  std::mt19937 chance(7);
  const auto size = [&] { return static_cast<int64_t>(1 + chance() % 100); };
  int compared = 0;
  const auto compare = [&](const Operator& op, const Call& call, const auto& product) {
    if (!is_small(op, call)) return;
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
    compare(mm, of({one, other}), [&] { return at::mm(one, other); });
    compare(addmm, of({bias, one, other}), [&] { return at::addmm(bias, one, other); });
    const at::Tensor ones = numbers({many, rows, inner}), others = numbers({many, inner, columns});
    const at::Tensor likely = at::_log_softmax(one, 1, false);
    compare(softmax, of({one}), [&] { return at::_log_softmax(one, 1, false); });
    compare(softmax_backward, of({one, likely}),
            [&] { return at::_log_softmax_backward_data(one, likely, 1, at::kFloat); });
    compare(bmm, of({ones, others}), [&] { return at::bmm(ones, others); });
  }
  EXPECT(compared > 1000);
}
