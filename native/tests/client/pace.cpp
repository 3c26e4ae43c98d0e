// Back-pressure: how far a notebook is ahead, and how it learns of the worker's progress.
#include "client/log/pace.h"

#include <sched.h>

#include <chrono>
#include <functional>
#include <stdexcept>

#include "tests/check.h"
#include "tests/harness.h"

using namespace sing;
using namespace sing::test;

namespace {

constexpr uint64_t kBytes = 100;  // of each record
constexpr uint64_t kSecond = 1'000'000'000;

struct Notebook {
  client::Pace pace;
  uint64_t records = 0, now = 1000 * kSecond;

  uint64_t ahead(uint64_t consumed) const { return records - consumed / kBytes; }
  // Writes a record, or returns the position for which it has to wait first.
  uint64_t write(uint64_t consumed) {
    if (pace.due(records)) {
      const uint64_t awaited = pace.mark(records, records * kBytes, consumed, now);
      if (awaited != 0) return awaited;
    }
    ++records;
    return 0;
  }
};

// Waits for an action of another thread.
void await(const std::function<bool()>& done) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(120);
  while (!done()) {
    if (std::chrono::steady_clock::now() > end) throw std::runtime_error("it never came");
    sched_yield();
  }
}

}  // namespace

TEST(of_slow_records_so_many_are_ahead_and_half_as_many_after_a_wait) {
  constexpr uint64_t most = client::Pace::kRecords;
  Notebook notebook;
  uint64_t consumed = 0;
  for (int turn = 0; turn < 20; ++turn) {
    uint64_t awaited = 0;
    while ((awaited = notebook.write(consumed)) == 0) EXPECT(notebook.ahead(consumed) < 2 * most);
    EXPECT(notebook.ahead(consumed) >= most && notebook.ahead(consumed) <= most + most / 4);
    EXPECT(awaited > consumed);
    EXPECT(notebook.ahead(awaited) >= most / 4 && notebook.ahead(awaited) <= most * 3 / 4);
    consumed = awaited;
    notebook.now += kSecond;
  }
}

TEST(of_quick_records_as_many_are_ahead_as_are_executed_in_about_a_second) {
  constexpr uint64_t rate = 100'000;  // per second
  Notebook notebook;
  uint64_t consumed = 0, waits = 0;
  for (uint64_t ms = 0; ms < 10'000; ++ms, notebook.now += kSecond / 1000) {
    for (uint64_t i = 0; i < 3 * rate / 1000; ++i) {
      const uint64_t awaited = notebook.write(consumed);
      if (awaited == 0) continue;
      ++waits;
      const uint64_t ticks = (awaited - consumed) / kBytes / (rate / 1000) + 1;
      EXPECT(ticks < 1000);
      ms += ticks;
      notebook.now += ticks * kSecond / 1000;
      consumed += ticks * (rate / 1000) * kBytes;
    }
    consumed += rate / 1000 * kBytes;
    EXPECT(notebook.ahead(consumed) <= 2 * rate);
  }
  EXPECT(waits > 0 && waits < 200);
}

TEST(a_notebook_that_is_hardly_ahead_is_not_held_up) {
  Notebook notebook;
  while (notebook.records < 100'000) {
    const uint64_t done = notebook.records < 500 ? 0 : notebook.records - 500;
    EXPECT_EQ(notebook.write(done * kBytes), 0u);
  }
}

TEST(a_worker_that_begins_anew_is_waited_for) {
  Notebook notebook;
  while (notebook.records < 5000) EXPECT_EQ(notebook.write(notebook.records * kBytes), 0u);
  uint64_t awaited = 0;
  while (awaited == 0) awaited = notebook.write(1000 * kBytes);
  EXPECT(notebook.ahead(awaited) <= client::Pace::kRecords);
}

TEST(the_bell_rings_once_where_the_notebook_waits_for_the_worker) {
  Host host;
  uint64_t middle = 0;
  for (int i = 0; i < 100; ++i) {
    host.allocate({4});
    if (i == 50) middle = host.head();
  }
  host.client().progress_wanted.store(middle);
  const auto& bell = host.worker().bell;
  const uint32_t before = bell.load();
  host.start();
  await([&] { return host.worker().consumed.load() == host.head(); });
  EXPECT_EQ(bell.load(), before + 1);
  // A position that is published too late is noticed after the next record.
  host.client().progress_wanted.store(middle + 1);
  host.allocate({4});
  await([&] { return bell.load() != before + 1; });
  EXPECT_EQ(bell.load(), before + 2);
}
