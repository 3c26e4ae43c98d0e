// Rhythm: when a program is saved that changes the same storages in each of its steps.
#include "worker/snapshot/rhythm.h"

#include <thread>

#include "tests/check.h"

using namespace sing;
using namespace sing::test;

namespace {

constexpr int kQuiet = 64;
constexpr int kBurst = 40;
constexpr int kStep = kQuiet + kBurst;

// A program whose steps end with a burst of changes, each some records after the other.
class Program {
 public:
  explicit Program(Rhythm& rhythm) : rhythm_(rhythm) {}

  void record() {
    rhythm_.record();
    const int within = at_++ % kStep - kQuiet;
    if (within >= 0 && within % 3 == 0) rhythm_.changed_again();
  }
  void run(int records) {
    for (int i = 0; i < records; ++i) record();
  }
  // Continues until the wait that another thread has begun is over; returns the place in the step.
  int run_until_over() {
    while (rhythm_.awaited()) record();
    return (at_ - 1) % kStep;
  }

 private:
  Rhythm& rhythm_;
  int at_ = 0;
};

// Waits in another thread, beginning while the program does not execute.
class Waiting {
 public:
  explicit Waiting(Rhythm& rhythm)
      : thread_([&rhythm] { rhythm.await_burst([] { return false; }); }) {
    while (!rhythm.awaited()) std::this_thread::yield();
  }

 private:
  std::jthread thread_;
};

}  // namespace

TEST(a_wait_ends_right_after_a_burst_wherever_it_begins) {
  for (int begin = 0; begin < kStep; begin += 7) {
    Rhythm rhythm;
    Program program(rhythm);
    program.run(3 * kStep + begin);
    for (int again = 0; again < 3; ++again) {
      const Waiting waiting(rhythm);
      const int found = program.run_until_over();
      EXPECT(found >= 3);
      EXPECT(found <= kStep / 8 + 3);
      program.run(2 * kStep + begin - found);
    }
  }
}

TEST(who_changes_nothing_again_is_not_waited_for) {
  Rhythm rhythm;
  rhythm.await_burst([] { return false; });
  Program program(rhythm);
  program.run(kQuiet);
  rhythm.await_burst([] { return false; });
  program.run(kStep);
  for (int i = 0; i < 3 * kStep; ++i) rhythm.record();
  rhythm.await_burst([] { return false; });
}

TEST(a_wait_may_be_cut_short) {
  Rhythm rhythm;
  Program program(rhythm);
  program.run(2 * kStep);
  int asked = 0;
  rhythm.await_burst([&] { return ++asked == 2; });
  EXPECT_EQ(asked, 2);
  program.run(2 * kStep);
  const Waiting waiting(rhythm);
  rhythm.ring();
  EXPECT(!rhythm.awaited());
}
