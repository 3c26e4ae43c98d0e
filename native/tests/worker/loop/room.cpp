// A device without memory for what was granted: Note [Room] and Note [Memory failures].
#include <unistd.h>

#include "tests/check.h"
#include "tests/device/async_device.h"
#include "tests/harness.h"

using namespace sing;
using namespace sing::test;

namespace {

using Floats = std::vector<float>;

// Refusals befall the records of the program alone.
struct Short {
  AsyncDevice& device = AsyncDevice::at();
  Host host;
  Tensor x, weights;
  int asked = 0;  // how often the agent was asked for room

  Short() {
    reset();
    host.options.device = AsyncDevice::device();
    host.options.room = [this] { ++asked; };
    host.start();
    add_ = host.define("aten::add_", "Scalar");
    mul_ = host.define("aten::mul", "Tensor");
    multinomial_ = host.define("aten::multinomial");
    norm_ = host.define("aten::native_batch_norm");
    x = host.upload({1, 2, 3}, {3});
    weights = host.upload(Floats(64, 1), {64});
    host.wait_consumed();
  }
  void reset() {
    DeviceOptions options;
    options.record = executed_record;
    device.reset(options);
  }
  void another_worker(int snapshot = -1) {
    reset();
    host.start(snapshot);
  }
  Tensor doubled() {
    const Tensor result{host.next_id(), {3}};
    host.call(CallRecord(mul_, 2, 1).tensor(x).number(2).returns(result));
    return result;
  }
  void add() { host.call(CallRecord(add_, 3, 1).tensor(x).real(1).integer(1).returns_nothing()); }
  // Its change of `mean` and `variance` is not in its schema.
  void normalise(const Tensor& mean, const Tensor& variance) {
    const Tensor input = host.upload({1, 3}, {2, 1});
    const Tensor result{host.next_id(), {2, 1}}, saved{host.next_id(), {1}};
    const Tensor deviation{host.next_id(), {1}};
    host.call(CallRecord(norm_, 8, 3)
                  .tensor(input)
                  .none()
                  .none()
                  .tensor(mean)
                  .tensor(variance)
                  .boolean(true)
                  .real(0.5)
                  .real(1e-5)
                  .returns(result)
                  .returns(saved)
                  .returns(deviation));
  }
  // The device draws before it takes memory for the result.
  Tensor permutation() {
    const Tensor result{host.next_id(), {64}, at::ScalarType::Long};
    host.call(CallRecord(multinomial_, 4, 1)
                  .tensor(weights)
                  .integer(64)
                  .boolean(false)
                  .generator(1)
                  .returns(result));
    return result;
  }

 private:
  uint32_t add_, mul_, multinomial_, norm_;
};

}  // namespace

TEST(an_operator_that_finds_no_memory_is_tried_again_with_more) {
  Short session;
  Host& host = session.host;
  const Tensor large = host.upload(Floats(1 << 16, 1), {1 << 16});
  host.free(large.id);
  host.wait_consumed();
  EXPECT(session.device.kept() > 0);
  session.device.refuse_allocation(0);
  const Tensor result = session.doubled();
  EXPECT_EQ(host.values(result), (Floats{2, 4, 6}));
  EXPECT_EQ(session.asked, 1);
  EXPECT(session.device.kept() < 4096);  // its own cache was given back
}

TEST(an_operator_that_finds_no_memory_twice_fails_and_changes_nothing) {
  Short session;
  Host& host = session.host;
  session.device.refuse_allocation(0, 2);
  const Tensor result = session.doubled();
  const Answer failed = host.synchronize();
  EXPECT_EQ(failed.kind(), ErrorKind::out_of_memory);
  EXPECT_EQ(failed.operation(), std::string("aten::mul.Tensor"));
  EXPECT_EQ(session.asked, 1);
  EXPECT_EQ(host.read(result).kind(), ErrorKind::lost_operand);
  EXPECT_EQ(host.values(session.doubled()), (Floats{2, 4, 6}));
}

TEST(an_operator_that_changes_an_operand_is_not_tried_again) {
  Short session;
  Host& host = session.host;
  const Tensor mean = host.upload({0}, {1}), variance = host.upload({1}, {1});
  host.wait_consumed();
  // Not of its input, which is in memory before the operator begins.
  session.device.refuse_allocation(1);
  session.normalise(mean, variance);
  EXPECT_EQ(host.synchronize().kind(), ErrorKind::out_of_memory);
  EXPECT_EQ(session.asked, 0);
  EXPECT_EQ(host.values(mean), Floats{0});
  session.normalise(mean, variance);
  EXPECT_EQ(host.values(mean), Floats{1});
}

TEST(an_operand_that_finds_no_memory_is_tried_again_whatever_the_operator_changes) {
  Short session;
  Host& host = session.host;
  const uint32_t fill = host.define("aten::fill_", "Scalar");
  const Tensor fresh = host.allocate({2});
  session.device.refuse_allocation(0);
  host.call(CallRecord(fill, 2, 1).tensor(fresh).real(3).returns_nothing());
  EXPECT_EQ(host.values(fresh), (Floats{3, 3}));
  EXPECT_EQ(session.asked, 1);
}

TEST(an_operator_that_draws_is_tried_again_with_the_same_numbers) {
  const auto drawn = [](uint64_t refused) {
    Short session;
    Host& host = session.host;
    host.generator(1, GeneratorAction::seed, 5);
    host.wait_consumed();
    if (refused != 0) session.device.refuse_allocation(0, refused);
    const Tensor first = session.permutation();
    const bool failed = !host.synchronize().ok();
    EXPECT_EQ(failed, refused == 2);
    const Bytes again = host.read(session.permutation()).bytes;
    return std::pair(failed ? Bytes() : host.read(first).bytes, again);
  };
  const auto undisturbed = drawn(0);
  EXPECT(drawn(1) == undisturbed);
  EXPECT(drawn(2).second == undisturbed.first);
}

TEST(a_record_without_memory_fails_again_when_the_log_is_executed_again) {
  Short session;
  Host& host = session.host;
  session.device.refuse_allocation(0, 2);
  const Tensor lost = session.doubled();
  session.add();
  EXPECT_EQ(host.synchronize().kind(), ErrorKind::out_of_memory);
  session.add();
  EXPECT_EQ(host.values(session.x), (Floats{3, 4, 5}));
  host.stop();
  session.another_worker();
  EXPECT_EQ(host.values(session.x), (Floats{3, 4, 5}));
  EXPECT_EQ(host.read(lost).kind(), ErrorKind::lost_operand);
  EXPECT_EQ(host.worker().memory_failures.load(), uint64_t{1});
}

TEST(what_exceeded_the_grant_fails_again_with_a_larger_one) {
  Host host;
  host.grant(4096);
  host.start();
  const uint32_t fill = host.define("aten::fill_", "Scalar");
  const Tensor large = host.allocate({1025});
  host.call(CallRecord(fill, 2, 1).tensor(large).integer(1).returns_nothing());
  EXPECT_EQ(host.synchronize().kind(), ErrorKind::out_of_memory);
  host.stop();
  host.grant(1 << 20);
  host.start();
  EXPECT_EQ(host.read(large).kind(), ErrorKind::lost_operand);
}

TEST(a_record_that_had_memory_before_waits_for_it_when_the_log_is_executed_again) {
  Short session;
  Host& host = session.host;
  const Tensor result = session.doubled();
  host.wait_consumed();
  host.stop();
  session.reset();
  session.device.refuse_allocation(0, 1000);
  host.start();
  EXPECT(host.corruption().find("out of memory") != std::string::npos);
  session.another_worker();
  EXPECT_EQ(host.values(result), (Floats{2, 4, 6}));
}

TEST(a_recovery_over_more_failures_than_are_listed_is_approximate) {
  Short session;
  Host& host = session.host;
  const auto fail = [&] {
    session.device.refuse_allocation(0, 2);
    session.doubled();
    EXPECT_EQ(host.synchronize().kind(), ErrorKind::out_of_memory);
  };
  for (uint32_t i = 0; i < kMemoryFailuresMax; ++i) fail();
  EXPECT_EQ(host.worker().inexact_ns.load(), uint64_t{0});
  uint64_t position = 0;
  close(host.snapshot(&position));
  host.commit(position);
  fail();  // those before the snapshot are not needed any more
  EXPECT_EQ(host.worker().memory_failures.load(), uint64_t{1});
  for (uint32_t i = 0; i < kMemoryFailuresMax; ++i) fail();
  EXPECT(host.worker().memory_unlisted.load() > position);
  EXPECT(host.synchronize().ok());
  EXPECT(host.worker().inexact_ns.load() != 0);
}
