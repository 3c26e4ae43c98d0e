// Calls that other sessions have executed, and whose results are not needed, are not executed.
#include "oplog/settings.h"
#include "tests/worker/replicas/company.h"

using namespace sing;
using namespace sing::test;

namespace {

// The steps of an optimizer, as torch's AdamW with foreach issues them, on equal parameters and
// gradients.
class Optimizer {
 public:
  explicit Optimizer(Rank& rank) : rank_(rank), host_(rank.host) {
    lerp_ = host_.define("aten::_foreach_lerp_", "Scalar");
    addcmul_ = host_.define("aten::_foreach_addcmul_", "Scalar");
    sqrt_ = host_.define("aten::_foreach_sqrt");
    add_ = host_.define("aten::_foreach_add_", "Scalar");
    addcdiv_ = host_.define("aten::_foreach_addcdiv_", "Scalar");
    for (const int64_t count : kCounts) {
      parameters_.push_back(rank.constant(1, count));
      first_.push_back(rank.constant(0.5, count));
      second_.push_back(rank.constant(0.25, count));
    }
  }

  // `gradient`: the same on all ranks, as after a reduction.
  void step(float gradient) {
    std::vector<Tensor> gradients, roots;
    for (const int64_t count : kCounts) gradients.push_back(rank_.constant(gradient, count));
    rank_.scale(parameters_, 0.99);
    host_.call(CallRecord(lerp_, 3, 0).tensors(first_).tensors(gradients).real(0.1));
    rank_.scale(second_, 0.999);
    host_.call(CallRecord(addcmul_, 4, 0)
                   .tensors(second_)
                   .tensors(gradients)
                   .tensors(gradients)
                   .real(0.001));
    CallRecord roots_of(sqrt_, 1, 1);
    roots_of.tensors(second_);
    roots_of.writer().put(Tag::list);
    roots_of.writer().put<uint32_t>(static_cast<uint32_t>(std::size(kCounts)));
    for (const int64_t count : kCounts) {
      roots.push_back({host_.next_id(), {count}});
      roots_of.returns(roots.back());
    }
    host_.call(roots_of);
    rank_.scale(roots, 0.5);
    host_.call(CallRecord(add_, 2, 0).tensors(roots).real(1e-8));
    host_.call(
        CallRecord(addcdiv_, 4, 0).tensors(parameters_).tensors(first_).tensors(roots).real(-0.1));
    for (const Tensor& each : roots) host_.free(each.id);
    for (const Tensor& each : gradients) host_.free(each.id);
  }
  std::vector<float> state() {
    std::vector<float> values;
    for (const auto* tensors : {&parameters_, &first_, &second_}) {
      for (const Tensor& each : *tensors) values.push_back(rank_.value(each));
    }
    return values;
  }
  // Reads no bytes.
  const std::vector<Tensor>& parameters() const { return parameters_; }

  static constexpr int64_t kCounts[] = {10, 5'000, 300'000};
  static constexpr uint64_t kCalls = 8;  // of a step

 private:
  Rank& rank_;
  Host& host_;
  uint32_t lerp_, addcmul_, sqrt_, add_, addcdiv_;
  std::vector<Tensor> parameters_, first_, second_;
};

std::vector<float> alone(int steps) {
  Rank rank(nullptr);
  Optimizer optimizer(rank);
  for (int i = 0; i < steps; ++i) optimizer.step(static_cast<float>(i));
  return optimizer.state();
}

// A rank that has executed more than another one: its result, freed, is what the other one
// postpones.
struct Pair {
  explicit Pair(bool checks = false) : seat(2, checks) {
    seat.each([this](Rank& rank) {
      tensors.push_back(rank.constant(3));
      rank.host.wait_consumed();
      rank.scale({tensors.back()}, 2);
      if (tensors.size() == 1) {
        rank.host.wait_consumed();
        rank.scale({tensors.back()}, 5);
      }
    });
    EXPECT_EQ(seat.figures().postponed, uint64_t{1});
    EXPECT_EQ(seat.figures().recomputed, uint64_t{0});
  }
  Company seat;
  std::vector<Tensor> tensors;
};

}  // namespace

TEST(postponed_steps_of_an_optimizer_are_executed_by_one_rank) {
  constexpr int kSteps = 3;
  Company seat(4, /*checks=*/false);
  std::vector<std::unique_ptr<Optimizer>> optimizers;
  seat.each([&](Rank& rank) { optimizers.push_back(std::make_unique<Optimizer>(rank)); });
  uint64_t state_bytes = 0;
  for (const int64_t count : Optimizer::kCounts) state_bytes += 3 * sizeof(float) * count;
  for (int step = 0; step < kSteps; ++step) {
    size_t at = 0;
    seat.each([&](Rank&) { optimizers[at++]->step(static_cast<float>(step)); });
    EXPECT_EQ(seat.figures().bytes_shared, 3 * state_bytes);
  }
  EXPECT_EQ(seat.figures().executed, kSteps * Optimizer::kCalls);
  EXPECT_EQ(seat.figures().squashed, 3 * kSteps * Optimizer::kCalls);
  EXPECT_EQ(seat.figures().recomputed, uint64_t{0});
  const auto expected = alone(kSteps);
  for (auto& optimizer : optimizers) EXPECT_EQ(optimizer->state(), expected);
}

TEST(postponed_steps_of_an_optimizer_are_right) {
  Company seat(3);
  std::vector<std::unique_ptr<Optimizer>> optimizers;
  seat.each([&](Rank& rank) { optimizers.push_back(std::make_unique<Optimizer>(rank)); });
  for (int step = 0; step < 3; ++step) {
    for (size_t i = 0; i < 3; ++i) {
      const size_t rank = (i + static_cast<size_t>(step)) % 3;  // another one is the first
      optimizers[rank]->step(static_cast<float>(step));
      seat[rank].host.wait_consumed();
    }
  }
  const auto expected = alone(3);
  for (auto& optimizer : optimizers) EXPECT_EQ(optimizer->state(), expected);
}

TEST(postponed_calls_are_executed_when_their_results_are_read) {
  for (const bool checks : {false, true}) {
    Pair pair(checks);
    EXPECT_EQ(pair.seat[1].value(pair.tensors[1]), 6.0f);
    EXPECT_EQ(pair.seat.figures().recomputed, uint64_t{1});
    EXPECT_EQ(pair.seat[0].value(pair.tensors[0]), 30.0f);
  }
}

TEST(postponed_calls_are_executed_when_their_results_are_used) {
  Pair pair;
  Rank& rank = pair.seat[1];
  const Tensor other = rank.constant(7), product = rank.multiply(pair.tensors[1], other);
  EXPECT_EQ(rank.value(product), 42.0f);
  rank.scale({pair.tensors[1]}, 3);
  EXPECT_EQ(rank.value(pair.tensors[1]), 18.0f);
  EXPECT_EQ(pair.seat.figures().recomputed, uint64_t{1});
}

TEST(postponed_calls_keep_their_operands_as_they_were) {
  Company seat(2, /*checks=*/false);
  std::vector<Tensor> results, operands;
  seat.each([&](Rank& rank) {
    operands.push_back(rank.constant(3));
    results.push_back(rank.multiply(operands.back(), operands.back()));
    rank.host.wait_consumed();
    if (operands.size() == 1) rank.host.free(results[0].id);
  });
  EXPECT_EQ(seat.figures().postponed, uint64_t{1});
  seat[0].scale({operands[0]}, 10);
  seat[0].host.wait_consumed();
  const std::vector<float> values(Rank::kCount, 4);
  seat[1].host.write(operands[1], values.data());
  EXPECT_EQ(seat[1].value(operands[1]), 4.0f);
  EXPECT_EQ(seat.figures().recomputed, uint64_t{0});
  EXPECT_EQ(seat[1].value(results[1]), 9.0f);
  EXPECT_EQ(seat.figures().recomputed, uint64_t{1});
}

TEST(postponed_calls_are_never_executed_if_their_results_are_overwritten) {
  Pair pair;
  Rank& rank = pair.seat[1];
  const std::vector<float> values(Rank::kCount, 4);
  rank.host.write(pair.tensors[1], values.data());
  EXPECT_EQ(rank.value(pair.tensors[1]), 4.0f);
  EXPECT_EQ(pair.seat.figures().recomputed, uint64_t{0});
}

TEST(postponed_calls_are_in_snapshots) {
  Pair pair;
  Rank& rank = pair.seat[1];
  uint64_t position = 0;
  const File file(rank.host.snapshot(&position));
  EXPECT_EQ(pair.seat.figures().recomputed, uint64_t{1});
  rank.host.commit(position);
  rank.host.stop();
  rank.host.start(file.fd());
  EXPECT_EQ(rank.value(pair.tensors[1]), 6.0f);
}

TEST(postponed_calls_are_executed_before_settings_and_operators_change) {
  Pair first;
  Settings settings{};
  read_settings(settings);
  Writer record;
  put_settings(record, settings);
  first.seat[1].host.append(RecordKind::settings, 0, record);
  first.seat[1].host.wait_consumed();
  EXPECT_EQ(first.seat.figures().recomputed, uint64_t{1});
  Pair second;
  second.seat[1].host.define("aten::neg");
  second.seat[1].host.wait_consumed();
  EXPECT_EQ(second.seat.figures().recomputed, uint64_t{0});
  second.seat[1].host.append(RecordKind::define, 0, defined(second.seat[1].mul, "aten::neg", ""));
  second.seat[1].host.wait_consumed();
  EXPECT_EQ(second.seat.figures().recomputed, uint64_t{1});
  EXPECT_EQ(second.seat[1].value(second.tensors[1]), 6.0f);
}

TEST(postponed_calls_count_memory_as_executed_ones) {
  Pair pair;
  pair.seat[0].host.wait_consumed();
  EXPECT_EQ(pair.seat[1].host.worker().memory_resident.load(),
            pair.seat[0].host.worker().memory_resident.load());
}

TEST(postponed_calls_are_never_those_of_a_session_that_has_ended) {
  Company seat(2, /*checks=*/false);
  const Tensor tensor = seat[0].constant(3);
  seat[0].scale({tensor}, 2);
  seat[0].host.wait_consumed();
  seat[0].host.stop();
  seat[0].host.start();  // executes its log again
  EXPECT_EQ(seat[0].value(tensor), 6.0f);
  EXPECT_EQ(seat.figures().executed, uint64_t{2});
  EXPECT_EQ(seat.figures().postponed, uint64_t{0});
}
