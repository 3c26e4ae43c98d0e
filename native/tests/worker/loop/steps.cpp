// Steps: what a program's log shows of them.
#include "worker/loop/steps.h"

#include <thread>
#include <vector>

#include "tests/check.h"
#include "tests/harness.h"

using namespace sing;
using namespace sing::test;

namespace {

constexpr uint64_t kMillisecond = 1'000'000;

struct Record {
  uint64_t kind = 0;
  uint64_t memory = 1;
};

// A program that repeats the same records, one per millisecond.
class Program {
 public:
  void run(const std::vector<Record>& records, int times = 1) {
    for (int i = 0; i < times; ++i) {
      for (const Record& each : records) steps.note(each.kind, now += kMillisecond, each.memory);
    }
  }
  void pause(uint64_t ms) { now += ms * kMillisecond; }

  Steps steps;
  uint64_t now = 0;
};

std::vector<Record> different(uint64_t count, uint64_t first = 1) {
  std::vector<Record> records(count);
  for (uint64_t i = 0; i < count; ++i) records[i] = {first + i, 100 + i};
  return records;
}

double milliseconds_of_step(const Steps::Found& found) {
  return static_cast<double>(found.ns * found.records) /
         static_cast<double>(found.made * kMillisecond);
}

}  // namespace

TEST(a_repeated_stretch_is_a_step) {
  for (const uint64_t length : {1, 7, 100, 5000}) {
    for (const uint64_t before : {0, 37}) {
      Program program;
      program.run(different(before, 1 << 20));
      program.run(different(length), 5);
      const auto found = program.steps.find(0);
      EXPECT(found.has_value());
      EXPECT_EQ(found->records, length);
      EXPECT_EQ(milliseconds_of_step(*found), static_cast<double>(length));
    }
  }
}

TEST(the_nadir_is_where_memory_is_least) {
  Program program;
  program.run({{1, 50}, {2, 90}, {3, 20}, {4, 60}}, 4);
  const auto found = program.steps.find(0);
  EXPECT(found.has_value());
  EXPECT_EQ(found->nadir, 2u);
  EXPECT_EQ(found->memory_min, 20u);
  EXPECT_EQ(found->memory_max, 90u);
}

TEST(what_is_freed_after_a_record_counts_for_its_memory) {
  Program program;
  for (int i = 0; i < 4; ++i) {
    program.run({{1, 50}, {2, 90}});
    program.steps.amend(10);
    program.run({{3, 40}});
  }
  const auto found = program.steps.find(0);
  EXPECT_EQ(found.value().nadir, 1u);
  EXPECT_EQ(found->memory_min, 10u);
}

TEST(inner_loops_are_not_taken_for_the_step) {
  std::vector<Record> step;
  for (int layer = 0; layer < 4; ++layer) step.insert(step.end(), {{1}, {2}});
  step.insert(step.end(), {{3}, {4}, {5}});
  Program program;
  program.run(step, 4);
  EXPECT_EQ(program.steps.find(0).value().records, step.size());
}

TEST(a_record_now_and_then_is_forgiven) {
  const auto step = different(50);
  Program program;
  program.run(step, 4);
  auto other = step;
  other[20].kind = 777;
  program.run(other);
  program.run(step);
  EXPECT_EQ(program.steps.find(0).value().records, 50u);
}

TEST(nothing_is_found_where_nothing_repeats) {
  for (const uint64_t count : {0, 1, 2, 500}) {
    Program program;
    program.run(different(count));
    EXPECT(!program.steps.find(0).has_value());
    EXPECT(!program.steps.aim());
  }
  Program twice;
  twice.run(different(10), 2);
  EXPECT(!twice.steps.find(0).has_value());
}

TEST(only_steps_since_a_moment_are_counted) {
  Program program;
  const auto step = different(10);
  program.run(step, 8);
  program.pause(1000);
  const uint64_t since = program.now;
  program.run(step, 4);
  const auto found = program.steps.find(since);
  EXPECT_EQ(found.value().made, 30u);  // the first one began before
  EXPECT_EQ(milliseconds_of_step(*found), 10.0);
  EXPECT_EQ(program.steps.find(program.now).value().made, 0u);
}

TEST(fast_steps_are_counted_beyond_what_is_remembered) {
  Steps steps;
  uint64_t now = 0;
  const auto run = [&](uint64_t records, uint64_t ns) {
    for (uint64_t i = 0; i < records; ++i) steps.note(1 + i % 4, now += ns, 1);
  };
  run(1000, 1000);
  const uint64_t since = now;
  run(400'000, 1000);
  const auto found = steps.find(since);
  EXPECT_EQ(found.value().records, 4u);
  EXPECT(found->made > 390'000);
  EXPECT_EQ(found->ns, found->made * 1000);
}

TEST(a_program_is_looked_at_while_it_goes_on) {
  Steps steps;
  std::atomic<bool> over{false};
  std::jthread program([&] {
    for (uint64_t now = 0; !over; ++now) steps.note(1 + now % 5, now, 10 + now % 5);
  });
  while (steps.count() < Steps::kRecords) std::this_thread::yield();
  for (int i = 0; i < 200; ++i) {
    const auto found = steps.find(0);
    if (!found) continue;  // all that was copied has been overwritten
    EXPECT_EQ(found->records, 5u);
    EXPECT_EQ(found->memory_min, 10u);
    EXPECT_EQ(found->ns, found->made);
  }
  over = true;
}

TEST(the_next_nadir_is_where_it_stops) {
  Program program;
  const std::vector<Record> step{{1, 50}, {2, 20}, {3, 90}};
  program.run(step, 5);
  EXPECT(!program.steps.reached());
  EXPECT(program.steps.aim());
  EXPECT(!program.steps.reached());
  program.run({step[0]});
  EXPECT(!program.steps.reached());
  program.run({step[1]});
  EXPECT(program.steps.reached());
  program.steps.aim_at_nothing();
  EXPECT(!program.steps.reached());
}

// A session whose steps hold a large tensor from their second to their third record.
namespace {

class Training {
 public:
  Training() : host_() {
    host_.start();
    fill_ = host_.define("aten::fill_", "Scalar");
    small_ = host_.allocate({1});
  }
  // Appends steps, and notes the positions in the log.
  void append(int steps) {
    for (int i = 0; i < steps; ++i) {
      fill(small_);
      Tensor large = host_.allocate({1 << 16});
      fill(large);
      fill(large);
      host_.free(large.id);
      fill(small_);
    }
  }
  void await_end() {
    while (host_.worker().consumed.load() < host_.head()) std::this_thread::yield();
  }
  uint64_t resident() { return host_.worker().memory_resident.load(); }
  Host& host() { return host_; }

 private:
  void fill(const Tensor& tensor) {
    host_.call(CallRecord(fill_, 2, 1).tensor(tensor).real(1.0).returns_nothing());
  }

  Host host_;
  uint32_t fill_ = 0;
  Tensor small_;
};

}  // namespace

// Each time it must stop at the end of a step; the last time is in the middle of the log.
TEST(a_lease_is_taken_where_memory_is_least) {
  Training training;
  Host& host = training.host();
  Session& session = host.session();
  uint64_t token = 1;
  session.lease(token, true);
  training.append(8);
  training.await_end();
  EXPECT_EQ(session.step(0).value().records, 4u);
  bool midway = false;
  while (!midway) {
    session.gate(false);
    training.append(1000);
    session.gate(true);
    session.take_lease(token, 60'000 * kMillisecond);
    session.await_parked();
    EXPECT(training.resident() <= 1024);
    midway = host.worker().consumed.load() < host.head();
    session.lease(++token, true);
    training.await_end();
    host.commit(host.head());
  }
}

TEST(a_lease_is_taken_in_time_and_a_stale_token_takes_nothing) {
  Training training;
  Host& host = training.host();
  Session& session = host.session();
  session.lease(5, true);
  training.append(8);
  training.await_end();
  session.take_lease(4, uint64_t{3'600'000} * kMillisecond);  // stale: returns at once
  training.append(1);
  training.await_end();
  session.take_lease(5, uint64_t{3'600'000} * kMillisecond);  // it executes nothing
  session.await_parked();
  EXPECT_EQ(host.worker().gate_open.load(), 0u);
}
