// Sessions that one thread executes by turns: see Note [Turns] in worker/loop/seat.h.
#include "worker/loop/seat.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "oplog/futex.h"
#include "oplog/settings.h"
#include "tests/check.h"
#include "tests/harness.h"
#include "tests/worker/replicas/company.h"

using namespace sing;
using namespace sing::test;

namespace {

// A seat with its executor, and sessions that it executes.
class Seated {
 public:
  explicit Seated(size_t count) {
    for (size_t i = 0; i < count; ++i) {
      hosts_.push_back(std::make_unique<Host>());
      hosts_.back()->options.seat = &seat;
    }
  }
  ~Seated() {
    hosts_.clear();
    seat.end();
    executor_.join();
  }
  void start() {
    for (auto& host : hosts_) host->start();
  }
  Host& operator[](size_t index) { return *hosts_[index]; }

  Seat seat{0};

 private:
  std::vector<std::unique_ptr<Host>> hosts_;
  std::thread executor_{[this] { seat.serve(); }};
};

// Random numbers of the default generator, into a new tensor.
Tensor draw(Host& host, uint32_t op, int64_t count) {
  const Tensor tensor = host.allocate({count});
  host.call(CallRecord(op, 4, 1).tensor(tensor).real(0.0).real(1.0).none().returns_nothing());
  return tensor;
}

void await_peers(Host& host, bool waits) {
  host.client().awaiting_peers.store(waits ? 2 : 0);
  if (waits) futex_wake(low_half(host.client().head));
}

}  // namespace

TEST(sessions_in_a_seat_draw_the_numbers_that_they_draw_alone) {
  std::vector<std::vector<float>> alone;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    Host host;
    host.start();
    const uint32_t normal = host.define("aten::normal_");
    host.generator(0, GeneratorAction::seed, seed);
    for (int i = 0; i < 10; ++i) alone.push_back(host.values(draw(host, normal, 33)));
  }
  Seated seated(3);
  seated.start();
  std::vector<uint32_t> normals;
  for (uint64_t i = 0; i < 3; ++i) {
    normals.push_back(seated[i].define("aten::normal_"));
    seated[i].generator(0, GeneratorAction::seed, i + 1);
  }
  std::mt19937 order(7);
  std::vector<size_t> made(3, 0);
  while (made[0] + made[1] + made[2] < 30) {
    const size_t who = order() % 3;
    if (made[who] == 10) continue;
    const auto values = seated[who].values(draw(seated[who], normals[who], 33));
    EXPECT(values == alone[who * 10 + made[who]]);
    ++made[who];
  }
  EXPECT(seated.seat.switches().count <= 60);
}

TEST(a_generator_in_a_seat_survives_a_snapshot_taken_between_two_turns) {
  Seated seated(2);
  seated.start();
  const uint32_t normal = seated[0].define("aten::normal_");
  const uint32_t other = seated[1].define("aten::normal_");
  seated[0].generator(0, GeneratorAction::seed, 5);
  seated[0].values(draw(seated[0], normal, 3));
  seated[1].values(draw(seated[1], other, 7));
  const Bytes before = seated[0].generator_state(0);
  uint64_t position = 0;
  const int snapshot = seated[0].snapshot(&position);
  seated[1].values(draw(seated[1], other, 7));
  seated[0].stop();
  seated[0].start(snapshot);
  EXPECT(seated[0].generator_state(0) == before);
  close(snapshot);
}

TEST(settings_of_one_session_do_not_reach_another) {
  Seated seated(2);
  seated.start();
  Settings values{};
  read_settings(values);
  Writer changed;
  Settings other = values;
  other[0] = static_cast<uint8_t>(at::kDouble);  // the default dtype
  put_settings(changed, other);
  seated[0].append(RecordKind::settings, 0, changed);
  seated[0].wait_consumed();
  Settings now{};
  read_settings(now);
  EXPECT(now == other);
  EXPECT(seated[1].synchronize().ok());
  read_settings(now);
  EXPECT(now == values);
}

TEST(a_session_keeps_its_turn_while_its_client_is_busy) {
  Seated seated(2);
  seated.start();
  EXPECT(seated[0].synchronize().ok());
  const uint64_t before = seated.seat.switches().count;
  std::atomic<bool> over{false};
  std::thread other([&] {
    EXPECT(seated[1].synchronize().ok());
    over = true;
  });
  for (int i = 0; i < 1000 && !over; ++i) seated[0].allocate({1});
  await_peers(seated[0], true);
  other.join();
  EXPECT(seated.seat.switches().count <= before + 2);
}

TEST(a_turn_ends_at_once_when_a_program_has_its_answer_and_holds_nothing) {
  Seated seated(2);
  seated.start();
  // Less than a turn lasts while its program is expected to continue; the best of many, as other
  // threads may have the core.
  auto best = std::chrono::steady_clock::duration::max();
  for (int i = 0; i < 100; ++i) {
    EXPECT(seated[0].synchronize().ok());
    const auto begin = std::chrono::steady_clock::now();
    EXPECT(seated[1].synchronize().ok());
    best = std::min(best, std::chrono::steady_clock::now() - begin);
  }
  EXPECT(best < std::chrono::microseconds(500));
}

TEST(a_session_that_waits_for_its_turn_obeys_orders) {
  Seated seated(2);
  seated.start();
  EXPECT(seated[1].synchronize().ok());
  Occupied turn(seated.seat);
  turn.await_begun();
  const Tensor tensor = seated[1].allocate({4});
  (void)tensor;
  close(seated[1].snapshot());
  seated[1].session().lease(1, false);
  seated[1].session().await_parked();
  turn.release();
  seated[1].session().lease(2, true);
  EXPECT(seated[1].synchronize().ok());
}

TEST(sessions_join_and_leave_a_seat_while_others_execute) {
  Seated seated(4);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 10; ++round) {
        Host& host = seated[i];
        host.start(-1);
        for (int k = 0; k < 20; ++k) {
          host.upload({1, 2, 3}, {3});
          if (k % 5 == 0) EXPECT(host.synchronize().ok());
          if (k % 7 == 0) await_peers(host, k % 2 == 0);
        }
        host.stop();
        host.commit(0);
      }
    });
  }
  for (auto& each : threads) each.join();
}

TEST(an_error_of_one_session_ends_only_that_one) {
  Seated seated(2);
  seated.start();
  EXPECT(seated[0].synchronize().ok());
  Writer broken;
  broken.put<uint32_t>(77);
  seated[1].append(static_cast<RecordKind>(200), 0, broken);
  EXPECT(!seated[1].corruption().empty());
  EXPECT(seated[0].synchronize().ok());
}

TEST(a_session_that_holds_memory_keeps_its_turn_when_a_snapshot_begins) {
  Seated seated(2);
  seated.start();
  Host& holder = seated[0];
  const uint32_t mul = holder.define("aten::mul_", "Scalar");
  const uint32_t normal = holder.define("aten::normal_");
  const uint32_t other = seated[1].define("aten::normal_");
  seated[1].wait_consumed();
  for (int round = 0; round < 5; ++round) {
    const Tensor held = draw(holder, normal, 1 << 20);
    for (int i = 0; i < 300; ++i) {
      holder.call(CallRecord(mul, 2, 1).tensor(held).real(0.5).returns_nothing());
    }
    const uint64_t end = holder.client().head.load();
    while (!holder.worker().memory_resident.load()) sched_yield();  // its turn has begun
    for (int i = 0; i < 10; ++i) draw(seated[1], other, 33);
    while (seated.seat.waiting() == 0) sched_yield();
    const File snapshot(holder.session().snapshot(Manner::beside).fd);
    seated[1].wait_consumed();
    EXPECT_EQ(holder.worker().consumed.load(), end);
    holder.free(held.id);
    holder.wait_consumed();
  }
}

namespace {

// A session with a long turn, and another one whose program asks for a value.
struct Asking : Seated {
  Asking() : Seated(2) { start(); }
  // Returns where the long turn ends. Twice as much, and half of that, again and again.
  uint64_t compute(int count) {
    held = draw(computes, computes.define("aten::normal_"), 1 << 20);
    drawn = computes.values(held);
    const uint32_t mul = computes.define("aten::mul_", "Scalar");
    for (int i = 0; i < count; ++i) {
      const double by = i % 2 == 0 ? 0.5 : 2;
      computes.call(CallRecord(mul, 2, 1).tensor(held).real(by).returns_nothing());
    }
    return computes.client().head.load();
  }
  void twice() { asks.call(CallRecord(mul, 2, 1).tensor(asked).real(2).returns_nothing()); }

  Host& computes = (*this)[0];
  Host& asks = (*this)[1];
  const uint32_t mul = asks.define("aten::mul_", "Scalar");
  const Tensor asked = asks.upload({1, 2, 3}, {3});
  Tensor held;
  std::vector<float> drawn;
};

}  // namespace

TEST(a_program_that_waits_for_an_answer_has_a_turn_in_that_of_another_session) {
  Asking seated;
  seated.asks.wait_consumed();
  const uint64_t end = seated.compute(1000);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(seated.asks.values(seated.asked)[2], 3.0f);
  EXPECT(seated.computes.worker().consumed.load() < end);
  EXPECT_EQ(seated.computes.values(seated.held), seated.drawn);
}

TEST(a_program_that_asks_later_than_it_waits_has_such_a_turn) {
  Asking seated;
  seated.asks.wait_consumed();
  const uint64_t end = seated.compute(1000);
  seated.twice();
  while (seated.seat.waiting() == 0) sched_yield();
  EXPECT_EQ(seated.asks.values(seated.asked)[2], 6.0f);
  EXPECT(seated.computes.worker().consumed.load() < end);
}

TEST(a_program_that_asks_for_much_waits_for_its_turn) {
  Asking seated;
  seated.asks.wait_consumed();
  const uint64_t end = seated.compute(300);
  for (int i = 0; i < 10; ++i) seated.twice();
  EXPECT_EQ(seated.asks.values(seated.asked)[0], 1024.0f);
  EXPECT_EQ(seated.computes.worker().consumed.load(), end);
}

TEST(a_program_that_waits_with_a_corrupt_log_ends_alone) {
  Seated seated(2);
  seated.start();
  Host& computes = seated[0];
  const uint32_t mul = computes.define("aten::mul_", "Scalar");
  const Tensor held = draw(computes, computes.define("aten::normal_"), 1 << 20);
  computes.wait_consumed();
  for (int i = 0; i < 300; ++i) {
    computes.call(CallRecord(mul, 2, 1).tensor(held).real(1).returns_nothing());
  }
  seated[1].client().head.store(uint64_t{1} << 40);
  futex_wake(low_half(seated[1].client().head));
  EXPECT(!seated[1].corruption().empty());
  EXPECT(computes.synchronize().ok());
}

TEST(a_turn_waits_for_memory_that_another_session_gives_back) {
  Seated seated(2);
  seated.start();
  Host& host = seated[0];
  const uint32_t normal = host.define("aten::normal_");
  draw(host, normal, 3);
  host.wait_consumed();
  std::optional<Seat::GivingBack> giving_back(std::in_place, seated.seat);
  const uint64_t begin = host.client().head.load();
  draw(host, normal, 3);
  uint64_t position = 0;
  close(host.snapshot(&position));  // it parks although it waits
  EXPECT(position < host.client().head.load());
  EXPECT(position >= begin);
  giving_back.reset();
  host.wait_consumed();
}
