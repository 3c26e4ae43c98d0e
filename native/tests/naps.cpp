// A worker whose client asks for nothing: see Note [Naps] in worker/session.cpp.
#include <sched.h>

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

TEST(requests_and_orders_end_naps) {
  Host host;
  host.start();
  for (int i = 0; i < 20; ++i) {
    lull(host);
    EXPECT(host.synchronize().ok());
    lull(host);
    close(host.snapshot());
  }
}
