// Sessions of a seat change bytes that they hold once together: see Note [Rendezvous] in
// worker/replicas/rendezvous.h.
#include "worker/replicas/rendezvous.h"

#include <algorithm>
#include <barrier>
#include <cstdio>
#include <cstring>
#include <exception>
#include <future>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/check.h"
#include "tests/harness.h"
#include "tests/worker/exec/random_program.h"
#include "tests/worker/replicas/company.h"
#include "worker/loop/seat.h"
#include "worker/replicas/replicas.h"

using namespace sing;
using namespace sing::test;

namespace {

constexpr int64_t kCount = Job::kCount;
constexpr uint64_t kBytes = kCount * sizeof(float);

const void* memory(Rank& rank, const Tensor& tensor) {
  return rank.host.session().state().storages.slots()[tensor.id].storage.data();
}

void change_in_turn(bool checks) {
  Job job(4, checks);
  const auto weights = job.constant(3), steps = job.constant(1);
  const void* const before = memory(job[0], weights[0]);
  constexpr int kRounds = 5;
  float expected = 3;
  for (int i = 0; i < kRounds; ++i) {
    for (size_t rank = 0; rank < 4; ++rank) {
      // The first to come is another one each time.
      const size_t who = (rank + static_cast<size_t>(i)) % 4;
      job[who].scale({weights[who]}, 2);
      job[who].add({weights[who]}, {steps[who]}, 1);
    }
    expected = expected * 2 + 1;
    if (i % 2 == 0) continue;
    for (size_t rank = 0; rank < 4; ++rank) EXPECT_EQ(job[rank].value(weights[rank]), expected);
  }
  for (auto& rank : job.ranks) rank->host.wait_consumed();
  EXPECT_EQ(job.meetings().together, uint64_t{2 * kRounds});
  EXPECT_EQ(job.meetings().missed, uint64_t{0});
  EXPECT_EQ(job.replicas.figures().executed, uint64_t{2 * kRounds});
  EXPECT_EQ(job.replicas.figures().bytes_shared, 2 * 3 * kBytes);
  for (size_t rank = 0; rank < 4; ++rank) {
    if (!checks) EXPECT(memory(job[rank], weights[rank]) == before);
    EXPECT_EQ(job[rank].value(weights[rank]), expected);
    EXPECT_EQ(job[rank].value(steps[rank]), 1.0f);
  }
}

}  // namespace

TEST(sessions_change_what_they_share_in_the_memory_where_it_is) { change_in_turn(false); }

TEST(sessions_that_change_what_they_share_together_are_checked) { change_in_turn(true); }

TEST(a_session_that_does_not_come_keeps_its_bytes) {
  Job job(3);
  const auto weights = job.constant(3);
  job[2].host.client().awaiting_peers.store(1);
  job[0].scale({weights[0]}, 2);
  job[1].scale({weights[1]}, 2);
  EXPECT_EQ(job[0].value(weights[0]), 6.0f);
  EXPECT_EQ(job[1].value(weights[1]), 6.0f);
  EXPECT_EQ(job.meetings().together, uint64_t{0});
  EXPECT(job.meetings().missed > 0);
  EXPECT_EQ(job[2].value(weights[2]), 3.0f);
  job[2].scale({weights[2]}, 2);
  EXPECT_EQ(job[2].value(weights[2]), 6.0f);
}

TEST(sessions_that_change_it_differently_keep_their_bytes) {
  Job job(3);
  const auto weights = job.constant(3);
  const double factors[] = {2, 2, 5};
  Occupied turn(job.seat());
  turn.await_begun();
  for (const size_t rank : {2, 0, 1}) {  // in the order of their turns
    const size_t before = job.seat().waiting();
    job[rank].scale({weights[rank]}, factors[rank]);
    while (job.seat().waiting() == before) sched_yield();
  }
  turn.release();
  EXPECT_EQ(job[0].value(weights[0]), 6.0f);
  EXPECT_EQ(job[1].value(weights[1]), 6.0f);
  EXPECT_EQ(job[2].value(weights[2]), 15.0f);
  EXPECT_EQ(job.meetings().together, uint64_t{0});
}

TEST(bytes_that_another_tensor_of_an_owner_holds_are_not_changed) {
  Job job(2);
  // Of the first rank, the first tensor owns the version; of the second one, the other tensor.
  const Tensor first = job[0].constant(3, kCount), other_first = job[0].constant(3, kCount);
  const Tensor other_second = job[1].constant(3, kCount), second = job[1].constant(3, kCount);
  for (auto& rank : job.ranks) rank->host.wait_consumed();
  job[0].scale({first}, 2);
  job[1].scale({second}, 2);
  EXPECT_EQ(job[0].value(first), 6.0f);
  EXPECT_EQ(job[1].value(second), 6.0f);
  EXPECT_EQ(job[0].value(other_first), 3.0f);
  EXPECT_EQ(job[1].value(other_second), 3.0f);
}

TEST(a_call_that_fails_is_not_executed_together) {
  Job job(2);
  const auto weights = job.constant(3), steps = job.constant(1);
  for (size_t rank = 0; rank < 2; ++rank) {
    const uint32_t divide = job[rank].host.define("aten::div_", "Tensor_mode");
    job[rank].host.call(CallRecord(divide, 3, 1)
                            .tensor(weights[rank])
                            .tensor(steps[rank])
                            .string("as one likes")
                            .returns_nothing());
  }
  for (size_t rank = 0; rank < 2; ++rank) {
    EXPECT(!job[rank].host.synchronize().ok());
    EXPECT_EQ(job[rank].value(weights[rank]), 3.0f);
  }
  EXPECT_EQ(job.meetings().together, uint64_t{0});
}

TEST(a_session_obeys_orders_while_it_waits_for_others) {
  Job job(2);
  const auto weights = job.constant(3);
  job[0].scale({weights[0]}, 2);
  Session& session = job[0].host.session();
  uint64_t position = 0;
  close(job[0].host.snapshot(&position));
  EXPECT(position < job[0].host.head() || job.meetings().missed > 0);
  session.lease(1, false);
  session.await_parked();
  job[1].scale({weights[1]}, 2);
  EXPECT_EQ(job[1].value(weights[1]), 6.0f);
  session.lease(2, true);
  EXPECT_EQ(job[0].value(weights[0]), 6.0f);
  job[0].scale({weights[0]}, 2);
  job[0].host.stop();
  EXPECT_EQ(job[1].value(weights[1]), 6.0f);
}

TEST(snapshots_while_sessions_meet_have_the_bytes_of_their_positions) {
  Job job(3);
  const auto weights = job.constant(1), steps = job.constant(1);
  constexpr int kRounds = 300;
  std::vector<std::future<void>> programs;
  for (size_t rank = 0; rank < 3; ++rank) {
    programs.push_back(std::async(std::launch::async, [&, rank] {
      for (int i = 0; i < kRounds; ++i) job[rank].add({weights[rank]}, {steps[rank]}, 1);
    }));
  }
  std::mt19937 random(7);
  for (int i = 0; i < 30; ++i) {
    const size_t rank = random() % 3;
    uint64_t position = 0;
    const int snapshot = job[rank].host.snapshot(&position, random() % 2 == 0);
    Host& host = job[rank].host;
    host.prepare(snapshot);
    close(snapshot);
    host.take_over();
  }
  for (auto& each : programs) each.get();
  for (size_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(job[rank].value(weights[rank]), static_cast<float>(1 + kRounds));
  }
  std::printf("      %llu calls together\n",
              static_cast<unsigned long long>(job.meetings().together));
}

TEST(what_a_session_vacates_or_zeroes_takes_no_memory) {
  Job job(2);
  const auto weights = job.constant(3);
  const uint32_t zero = job[0].host.define("aten::zero_");
  for (const bool vacates : {true, false}) {
    if (vacates) {
      const Writer record = read_payload(weights[0].id, 0, kBytes);
      EXPECT(job[0].host.request(RecordKind::read, record, kLast).ok());
    } else {
      job[0].host.call(CallRecord(zero, 1, 1).tensor(weights[0]).returns_nothing());
    }
    job[0].host.wait_consumed();
    EXPECT_EQ(job[0].host.session().state().storages.resident(), uint64_t{0});
    EXPECT_EQ(job[1].value(weights[1]), 3.0f);
    if (!vacates) break;
    EXPECT(!job[0].host.read(weights[0]).ok());
    job[0].host.write(weights[0], std::vector<float>(kCount, 3.0f).data());
    EXPECT_EQ(job[0].value(weights[0]), 3.0f);
    EXPECT_EQ(job.replicas.figures().bytes_shared, kBytes);
  }
  EXPECT_EQ(job[0].value(weights[0]), 0.0f);
}

namespace {

constexpr int kSteps = 150;

// What depends on nothing but the seed: changes in place, of several tensors at once, like those of
// an optimizer, and whatever makes their bytes differ from those of others.
class Changes {
 public:
  Changes(Host& host, uint64_t seed) : host_(host), random_(seed) {
    scale_ = host.define("aten::_foreach_mul_", "Scalar");
    add_ = host.define("aten::_foreach_add_", "List");
    divide_ = host.define("aten::_foreach_addcdiv_", "Scalar");
    mul_ = host.define("aten::mul", "Tensor");
    shift_ = host.define("aten::add_", "Scalar");
    normal_ = host.define("aten::normal_");
    zero_ = host.define("aten::zero_");
    add_into_ = host.define("aten::add", "out");
    host.generator(1, GeneratorAction::seed, seed);
    for (int i = 0; i < 5; ++i) tensors_.push_back(constant());
  }
  void step() {
    const auto some = this->some(2);
    const Tensor &one = some[0], &other = some[1];
    switch (random_() % 17) {
      case 0: {
        if (random_() % 2 == 0) {
          const Writer last = read_payload(one.id, 0, kElements * sizeof(float));
          host_.request(RecordKind::read, last, kLast);
        }
        host_.write(one, std::vector<float>(kElements, number()).data());
        return;
      }
      case 1:
        host_.call(CallRecord(zero_, 1, 1).tensor(one).returns_nothing());
        return;
      case 2:
        host_.call(CallRecord(normal_, 4, 1)
                       .tensor(one)
                       .real(0.0)
                       .real(1.0)
                       .generator(1)
                       .returns_nothing());
        return;
      case 3:
        host_.values(one);
        return;
      case 4: {
        const Tensor result{host_.next_id(), one.sizes};
        host_.call(CallRecord(mul_, 2, 1).tensor(one).tensor(other).returns(result));
        host_.free(one.id);
        for (Tensor& each : tensors_) {
          if (each.id == one.id) each.id = result.id;
        }
        return;
      }
      case 5: {
        Tensor part = one;
        part.sizes = {kElements / 2};
        host_.call(CallRecord(shift_, 3, 1).tensor(part).real(number()).real(1).returns_nothing());
        return;
      }
      case 14:
      case 15:
        overwrite(one, other, 0, kElements / 2);
        if (random_() % 4 != 0) overwrite(one, other, kElements / 2, kElements / 2);
        return;
      case 16: {  // one by one, what an optimizer's step would have left
        for (const Tensor& each : tensors_) {
          if (each.id != other.id) overwrite(each, other, 0, kElements);
        }
        return;
      }
      case 6:
      case 7:
        host_.call(CallRecord(divide_, 4, 0)
                       .tensors({one})
                       .tensors({other})
                       .tensors({other})
                       .real(number()));
        return;
      case 8:
      case 9:
        host_.call(CallRecord(add_, 3, 0).tensors({one}).tensors({other}).real(number()));
        return;
      default:
        host_.call(CallRecord(scale_, 2, 0).tensors(this->some(1 + random_() % 4)).real(number()));
    }
  }
  std::vector<std::vector<float>> result() {
    std::vector<std::vector<float>> found;
    for (const Tensor& tensor : tensors_) found.push_back(host_.values(tensor));
    return found;
  }

 private:
  static constexpr int64_t kElements = 20'000;
  void overwrite(const Tensor& tensor, const Tensor& by, int64_t begin, int64_t count) {
    Geometry from = contiguous(by), to = contiguous(tensor);
    to.offset = begin;
    from.sizes = to.sizes = {count};
    host_.call(CallRecord(add_into_, 4, 1)
                   .tensor(by.id, from)
                   .tensor(by.id, from)
                   .integer(1)
                   .tensor(tensor.id, to)
                   .returns_nothing());
  }
  float number() { return static_cast<float>(random_() % 7 + 1) / 4; }
  Tensor constant() { return host_.upload(std::vector<float>(kElements, number()), {kElements}); }
  std::vector<Tensor> some(size_t count) {
    auto found = tensors_;
    std::shuffle(found.begin(), found.end(), random_);
    found.resize(count);
    return found;
  }

  Host& host_;
  Random random_;
  uint32_t scale_, add_, divide_, mul_, shift_, normal_, zero_, add_into_;
  std::vector<Tensor> tensors_;
};

std::vector<std::vector<float>> alone(uint64_t seed) {
  Host host(size_t{256} << 20);
  host.start();
  Changes program(host, seed);
  for (int i = 0; i < kSteps; ++i) program.step();
  return program.result();
}

// Not-a-number is equal to itself.
bool same(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& one, const auto& other) {
    return one.size() == other.size() &&
           std::memcmp(one.data(), other.data(), one.size() * sizeof(float)) == 0;
  });
}

// Three sessions execute the same program, another one a program of its own.
void compare(uint64_t seed, uint64_t& together, uint64_t& given_up) {
  const std::vector<uint64_t> seeds{seed, seed, seed, seed + 1'000'000};
  Replicas replicas;
  Seat seat(1);
  std::thread executor([&seat] { seat.serve(); });
  std::vector<std::unique_ptr<Host>> hosts;
  for (size_t i = 0; i < seeds.size(); ++i) {
    hosts.push_back(std::make_unique<Host>(size_t{256} << 20));
    SessionOptions& options = hosts.back()->options;
    options.seat = &seat;
    options.replicas = &replicas;
    options.limits.piece_bytes = 4096;
    options.limits.mapped_bytes = uint64_t{4096} << seed % 5;
    options.limits.together_bytes = 1;
    options.limits.check_splicing = seed % 3 == 0;
    hosts.back()->start();
    hosts.back()->client().awaiting_peers.store(1);  // no session waits long for it
  }
  std::barrier<> steps(static_cast<std::ptrdiff_t>(seeds.size()));
  std::vector<std::future<std::vector<std::vector<float>>>> found;
  for (size_t i = 0; i < seeds.size(); ++i) {
    found.push_back(std::async(std::launch::async, [&, i] {
      Changes program(*hosts[i], seeds[i]);
      Disturber disturber(*hosts[i], seed + i);
      const auto arrive = [&steps](std::barrier<>*) { steps.arrive_and_drop(); };
      const std::unique_ptr<std::barrier<>, decltype(arrive)> leaving(&steps, arrive);
      for (int step = 0; step < kSteps; ++step) {
        // Programs run ahead of each other, and of the device.
        if (static_cast<uint64_t>(step) % (1 + seed % 3 * 4) == 0) steps.arrive_and_wait();
        program.step();
        disturber.step();
      }
      disturber.finish();
      return program.result();
    }));
  }
  std::exception_ptr failure;
  for (size_t i = 0; i < seeds.size(); ++i) {
    try {
      if (!same(found[i].get(), alone(seeds[i]))) {
        throw CheckFailed("a result of session " + std::to_string(i) + " differs");
      }
    } catch (...) {
      failure = std::current_exception();
    }
  }
  together += replicas.rendezvous().figures().together;
  given_up += replicas.figures().given_up;
  hosts.clear();
  seat.end();
  executor.join();
  EXPECT_EQ(replicas.figures().versions, uint64_t{0});
  EXPECT_EQ(replicas.figures().bytes_shared, uint64_t{0});
  if (failure) std::rethrow_exception(failure);
}

}  // namespace

TEST(random_programs_that_change_bytes_together_end_as_alone) {
  uint64_t together = 0, given_up = 0;
  const uint64_t fresh = std::random_device()();
  for (uint64_t i = 0; i < 20; ++i) {
    const uint64_t seed = i < 10 ? i + 1 : fresh + i;
    try {
      compare(seed, together, given_up);
    } catch (const std::exception& error) {
      throw CheckFailed("program " + std::to_string(seed) + ": " + error.what());
    }
  }
  std::printf("      %llu calls together, %llu given up\n",
              static_cast<unsigned long long>(together), static_cast<unsigned long long>(given_up));
  EXPECT(together > 50);
  EXPECT(given_up > 5);
}
