// CUDA-only operators on a software device, against what the CPU computes itself.
#include "worker/operators/substitutes.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "tests/check.h"

using namespace sing;

namespace {

torch::jit::Stack run(const char* name, torch::jit::Stack stack) {
  const Substitute substitute = row_of(name).substitute;
  EXPECT(substitute != nullptr);
  substitute(stack);
  return stack;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.dtype() == b.dtype() &&
         std::memcmp(a.contiguous().const_data_ptr(), b.contiguous().const_data_ptr(),
                     a.nbytes()) == 0;
}

bool close(const at::Tensor& a, const at::Tensor& b) { return at::allclose(a, b, 1e-5, 1e-6); }

struct Gates {
  int64_t width;
  at::Tensor input, hidden, input_bias, hidden_bias, state, memory;
};

Gates gates(int64_t count) {
  at::manual_seed(1);
  const auto random = [](at::IntArrayRef sizes) { return at::randn(sizes); };
  return {5,
          random({3, count * 5}),
          random({3, count * 5}),
          random({count * 5}),
          random({count * 5}),
          random({3, 5}),
          random({3, 5})};
}

}  // namespace

TEST(dropout_has_the_bits_of_the_cpus_own) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const double p : {0.1, 0.3, 0.5, 0.77}) {
      const auto input = at::randn({37, 11}, at::kFloat).to(dtype).requires_grad_(true);
      at::manual_seed(4);
      const auto expected = at::dropout(input, p, true);
      const auto grad = at::randn({37, 11}, at::kFloat).to(dtype);
      expected.backward(grad);
      at::manual_seed(4);
      const auto results = run("aten::native_dropout", {input.detach(), p, true});
      EXPECT(same_bits(results[0].toTensor(), expected.detach()));
      const auto back =
          run("aten::native_dropout_backward", {grad, results[1].toTensor(), 1.0 / (1.0 - p)});
      EXPECT(same_bits(back[0].toTensor(), input.grad()));
    }
  }
}

TEST(dropout_of_all_or_nothing) {
  const auto input = at::randn({7});
  EXPECT(same_bits(run("aten::native_dropout", {input, 0.5, false})[0].toTensor(), input));
  EXPECT(same_bits(run("aten::native_dropout", {input, 0.0, true})[0].toTensor(), input));
  const auto none = run("aten::native_dropout", {input, 1.0, true});
  EXPECT(none[0].toTensor().eq(0).all().item<bool>());
  EXPECT(!none[1].toTensor().any().item<bool>());
}

TEST(a_dropout_of_whole_numbers_goes_back_as_the_cpus_does) {
  const auto grad = at::ones({3}, at::kLong);
  const auto mask = grad.to(at::kBool);
  EXPECT(same_bits(run("aten::native_dropout_backward", {grad, mask, 2.0})[0].toTensor(),
                   at::native_dropout_backward(grad, mask, 2.0)));
}

TEST(a_fused_lstm_cell_computes_what_lstm_cell_does) {
  for (const bool bias : {true, false}) {
    const Gates g = gates(4);
    const auto input = g.input.clone().requires_grad_(true);
    const auto memory = g.memory.clone().requires_grad_(true);
    auto sum = input + g.hidden;
    if (bias) sum = sum + g.input_bias + g.hidden_bias;
    const auto parts = sum.chunk(4, 1);
    const auto cy = parts[1].sigmoid() * memory + parts[0].sigmoid() * parts[2].tanh();
    const auto hy = parts[3].sigmoid() * cy.tanh();
    const auto none = c10::IValue();
    const auto forward = run("aten::_thnn_fused_lstm_cell",
                             {g.input, g.hidden, g.memory, bias ? c10::IValue(g.input_bias) : none,
                              bias ? c10::IValue(g.hidden_bias) : none});
    EXPECT(close(forward[0].toTensor(), hy));
    EXPECT(close(forward[1].toTensor(), cy));
    const auto grad_hy = at::randn({3, 5}), grad_cy = at::randn({3, 5});
    for (const int which : {1, 2, 3}) {
      const auto target = which == 1   ? (hy * grad_hy).sum()
                          : which == 2 ? (cy * grad_cy).sum()
                                       : (hy * grad_hy).sum() + (cy * grad_cy).sum();
      input.mutable_grad() = at::Tensor();
      memory.mutable_grad() = at::Tensor();
      target.backward({}, /*retain_graph=*/true);
      const auto back =
          run("aten::_thnn_fused_lstm_cell_backward_impl",
              {which & 1 ? c10::IValue(grad_hy) : none, which & 2 ? c10::IValue(grad_cy) : none,
               g.memory, forward[1].toTensor(), forward[2].toTensor(), bias});
      EXPECT(close(back[0].toTensor(), input.grad()));
      EXPECT(close(back[1].toTensor(), memory.grad()));
      EXPECT_EQ(back[2].toTensor().defined(), bias);
      if (bias) EXPECT(close(back[2].toTensor(), input.grad().sum(0)));
    }
  }
}

TEST(a_fused_gru_cell_computes_what_gru_cell_does) {
  for (const bool bias : {true, false}) {
    const Gates g = gates(3);
    const auto input = g.input.clone().requires_grad_(true);
    const auto hidden = g.hidden.clone().requires_grad_(true);
    const auto state = g.state.clone().requires_grad_(true);
    const auto from_input = (bias ? input + g.input_bias : input).chunk(3, 1);
    const auto from_hidden = (bias ? hidden + g.hidden_bias : hidden).chunk(3, 1);
    const auto reset = (from_input[0] + from_hidden[0]).sigmoid();
    const auto update = (from_input[1] + from_hidden[1]).sigmoid();
    const auto fresh = (from_input[2] + reset * from_hidden[2]).tanh();
    const auto hy = fresh + update * (state - fresh);
    const auto none = c10::IValue();
    const auto forward = run("aten::_thnn_fused_gru_cell",
                             {g.input, g.hidden, g.state, bias ? c10::IValue(g.input_bias) : none,
                              bias ? c10::IValue(g.hidden_bias) : none});
    EXPECT(close(forward[0].toTensor(), hy));
    EXPECT((forward[1].toTensor().sizes() == at::IntArrayRef{3, 25}));
    const auto grad = at::randn({3, 5});
    hy.backward(grad);
    const auto back =
        run("aten::_thnn_fused_gru_cell_backward", {grad, forward[1].toTensor(), bias});
    EXPECT(close(back[0].toTensor(), input.grad()));
    EXPECT(close(back[1].toTensor(), hidden.grad()));
    EXPECT(close(back[2].toTensor(), state.grad()));
    EXPECT_EQ(back[3].toTensor().defined(), bias);
    if (bias) EXPECT(close(back[4].toTensor(), hidden.grad().sum(0)));
  }
}

TEST(a_sparse_reduction_notes_what_it_chose_where_gradients_are_wanted) {
  const auto dense = at::randn({3, 2}), grad = at::ones({3, 2});
  const c10::List<bool> both({true, true});
  for (const bool wanted : {true, false}) {
    const c10::AutoGradMode mode(wanted);
    const auto sparse = (at::eye(3) * 2).to_sparse_csr();
    const auto forward = run("aten::_sparse_mm_reduce_impl", {sparse.clone(), dense, "amax"});
    EXPECT(close(forward[0].toTensor().detach(), dense * 2));
    const auto back = [&](const at::Tensor& chosen) {
      return run("aten::_sparse_mm_reduce_impl_backward",
                 {sparse, grad, dense, "amax", chosen, both})[1]
          .toTensor();
    };
    const at::Tensor chosen = forward[1].toTensor();
    if (wanted) {
      EXPECT(close(back(chosen), grad * 2));
      EXPECT_THROWS(c10::Error, back(chosen + 4));
    } else {
      EXPECT_THROWS(c10::Error, back(chosen));
    }
  }
}

TEST(other_operators_need_no_substitute) { EXPECT(row_of("aten::add.out").substitute == nullptr); }
