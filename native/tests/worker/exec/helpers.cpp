// Helpers: when the compute threads beside the worker's main thread are to sleep.
#include "worker/exec/helpers.h"

#include "tests/check.h"

using namespace sing;

namespace {

constexpr uint64_t kMs = 1'000'000;

// One window of work in equal stretches with a wait after each.
void work(Helpers& helpers, uint64_t& now, int stretches, uint64_t stretch_ns) {
  for (int i = 0; i < stretches; ++i) {
    now += stretch_ns;
    helpers.worked(now, stretch_ns);
    helpers.waited();
  }
}

}  // namespace

TEST(helpers_sleep_while_the_worker_keeps_waiting_for_records) {
  Helpers helpers(2);
  uint64_t now = 1000 * kMs;
  work(helpers, now, 100, 100 * kMs / 1000);
  work(helpers, now, 600, kMs / 10);
  EXPECT(helpers.asleep());
  // A value between the two limits changes nothing.
  work(helpers, now, 100, 3 * kMs / 2);
  EXPECT(helpers.asleep());
  work(helpers, now, 30, 10 * kMs);
  EXPECT(!helpers.asleep());
  work(helpers, now, 100, 3 * kMs / 2);
  EXPECT(!helpers.asleep());
}

TEST(helpers_stay_awake_while_the_log_is_long) {
  Helpers helpers(4);
  for (uint64_t now = kMs; now < 1000 * kMs; now += kMs) helpers.worked(now, kMs);
  EXPECT(!helpers.asleep());
}

TEST(one_compute_thread_has_no_helpers) {
  Helpers helpers(1);
  uint64_t now = 1000 * kMs;
  work(helpers, now, 2000, kMs / 10);
  EXPECT(!helpers.asleep());
}
