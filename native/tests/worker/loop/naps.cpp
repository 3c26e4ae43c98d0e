// A worker whose client makes no requests: see Note [Naps] in worker/loop/session.cpp.
#include <sched.h>

#include <chrono>
#include <memory>
#include <thread>

#include "oplog/futex.h"
#include "tests/check.h"
#include "tests/harness.h"

using namespace sing;
using namespace sing::test;

namespace {

Rest rest(Host& host) { return static_cast<Rest>(host.worker().asleep.load()); }

// Writes records until the worker naps after one.
void lull(Host& host) {
  for (;;) {
    host.allocate({1});
    while (host.worker().consumed.load() != host.head()) sched_yield();
    Rest now = Rest::awake;
    while ((now = rest(host)) == Rest::awake) sched_yield();
    if (now == Rest::napping) return;
  }
}

}  // namespace

TEST(a_nap_ends_by_itself_and_what_was_written_meanwhile_is_executed) {
  Host host;
  host.start();
  for (int i = 0; i < 20; ++i) {
    lull(host);
    for (int j = 0; j < 5; ++j) host.allocate({1});
    while (host.worker().consumed.load() != host.head()) sched_yield();
  }
}

TEST(a_nap_without_records_ends_in_sleep) {
  Host host;
  host.start();
  for (int i = 0; i < 20; ++i) {
    lull(host);
    while (rest(host) != Rest::asleep) sched_yield();
  }
}

TEST(requests_and_orders_are_met_in_naps) {
  Host host;
  host.start();
  for (int i = 0; i < 20; ++i) {
    lull(host);
    EXPECT(host.synchronize().ok());
    lull(host);
    close(host.snapshot());
  }
}

// The naps last for days, so only a wake-up ends them.
TEST(orders_and_the_clients_wake_end_a_nap) {
  constexpr std::chrono::hours kDays{100};
  const auto page = std::make_unique<WorkerPage>();
  Orders orders(*page);
  Word<uint64_t> head{0};
  const auto napping = [&] {
    while (page->asleep.load() != static_cast<uint32_t>(Rest::napping)) sched_yield();
  };
  {
    const std::jthread main([&] { orders.sleep(head, 0, kDays, Rest::napping); });
    napping();
    orders.wake();
  }
  {
    const std::jthread main([&] { orders.sleep(head, 0, kDays, Rest::napping); });
    napping();
    head.store(1);
    while (futex_wake(low_half(head)) == 0 && page->asleep.load() != 0) sched_yield();
  }
  EXPECT_EQ(page->asleep.load(), static_cast<uint32_t>(Rest::awake));
}
