// Memory of the arena that is taken before a snapshot needs it.
#include <sys/stat.h>

#include <string>
#include <thread>
#include <vector>

#include "tests/check.h"
#include "tests/harness.h"

using namespace sing;
using namespace sing::test;

namespace {

constexpr int64_t kCount = 1 << 20;  // floats
constexpr uint64_t kBytes = kCount * sizeof(float);

uint64_t memory_of(int fd) {
  struct stat found{};
  EXPECT_EQ(fstat(fd, &found), 0);
  return static_cast<uint64_t>(found.st_blocks) * 512;
}

// Changes all of its tensors in each step.
class Training {
 public:
  explicit Training(Host& host, int count) : host_(host) {
    fill_ = host.define("aten::fill_", "Scalar");
    for (int i = 0; i < count; ++i) tensors_.push_back(host.allocate({kCount}));
    step(1);
  }
  void step(double value) {
    for (const Tensor& tensor : tensors_) {
      host_.call(CallRecord(fill_, 2, 1).tensor(tensor).real(value).returns_nothing());
    }
    host_.wait_consumed();
  }
  void end_with_one() {
    while (tensors_.size() > 1) {
      host_.free(tensors_.back().id);
      tensors_.pop_back();
    }
    host_.wait_consumed();
  }
  bool all_are(float value) {
    for (const Tensor& tensor : tensors_) {
      if (host_.values(tensor) != std::vector<float>(kCount, value)) return false;
    }
    return true;
  }

 private:
  Host& host_;
  uint32_t fill_;
  std::vector<Tensor> tensors_;
};

}  // namespace

TEST(a_snapshot_needs_no_memory_that_was_not_taken_before_it) {
  Host host;
  host.start();
  Training training(host, 3);
  uint64_t position = 0;
  const File older(host.snapshot(&position));
  host.commit(position);
  training.step(2);
  EXPECT_EQ(memory_of(host.arena()), 3 * kBytes);
  host.session().preallocate();
  const uint64_t taken = memory_of(host.arena());
  EXPECT_EQ(taken, 6 * kBytes);
  training.step(3);
  const File newer(host.snapshot(&position));
  EXPECT_EQ(memory_of(host.arena()), taken);
  host.commit(position);
  training.step(4);
  host.stop();
  host.start(newer.fd());
  host.wait_consumed();
  EXPECT(training.all_are(4));
}

TEST(a_snapshot_beside_the_execution_leaves_what_was_taken_for_another_one) {
  Host host;
  host.start();
  Training training(host, 2);
  host.session().preallocate();
  uint64_t position = 0;
  const File beside(host.snapshot(&position, false));
  host.commit(position);
  training.step(2);
  host.session().preallocate();
  const uint64_t taken = memory_of(host.arena());
  EXPECT_EQ(taken, 4 * kBytes);
  const File another(host.snapshot(&position, false));
  EXPECT_EQ(memory_of(host.arena()), taken);
  host.commit(position);
  host.session().trim();
  EXPECT_EQ(memory_of(host.arena()), 2 * kBytes);
  EXPECT(training.all_are(2));
}

TEST(memory_that_was_taken_in_vain_is_given_back_after_a_while) {
  for (const bool late : {false, true}) {
    Host host;
    if (late) host.options.limits.preallocated_ns = 0;
    host.start();
    Training training(host, 2);
    uint64_t position = 0;
    const File older(host.snapshot(&position));
    host.commit(position);
    training.step(2);
    host.session().preallocate();
    training.end_with_one();
    const File newer(host.snapshot(&position, false));
    EXPECT_EQ(memory_of(host.arena()), (late ? 3 : 4) * kBytes);
    EXPECT(training.all_are(2));
  }
}

TEST(a_patient_snapshot_that_is_not_needed_any_more_ends) {
  Host host;
  host.start();
  Training training(host, 40);
  training.step(2);  // they change again and again: memory for them is taken in advance
  std::string failure;
  std::thread taking([&] {
    try {
      File(host.session().snapshot(Manner::patient).fd);
    } catch (const std::exception& error) {
      failure = error.what();
    }
  });
  while (memory_of(host.arena()) == 0) std::this_thread::yield();
  host.session().drop_snapshot();
  taking.join();
  EXPECT(!failure.empty());
  const File whole(host.snapshot());
  training.step(3);
  host.stop();
  host.start(whole.fd());
  host.wait_consumed();
  EXPECT(training.all_are(3));
}

TEST(a_snapshot_that_is_not_patient_is_not_given_up) {
  Host host;
  host.start();
  Training training(host, 40);
  training.step(2);
  int taken = -1;
  std::thread taking([&] { taken = host.session().snapshot(Manner::beside).fd; });
  while (memory_of(host.arena()) == 0) std::this_thread::yield();
  host.session().drop_snapshot();
  taking.join();
  const File whole(taken);
  host.stop();
  host.start(whole.fd());
  host.wait_consumed();
  EXPECT(training.all_are(2));
}

TEST(a_preallocation_ends_with_the_session_or_when_others_wait) {
  for (const bool ends : {false, true}) {
    Host host;
    host.start();
    Training training(host, 40);
    std::thread taking([&] { host.session().preallocate(); });
    while (memory_of(host.arena()) == 0) std::this_thread::yield();
    ends ? host.session().end() : host.session().hurry();
    taking.join();
    EXPECT(memory_of(host.arena()) < 40 * kBytes);
    if (!ends) EXPECT(training.all_are(1));
  }
}
