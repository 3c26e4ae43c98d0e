// Faults of kernels on the asynchronous device: where the worker notices them, and what careful
// workers find.
#include <ATen/core/Tensor.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>

#include "tests/check.h"
#include "tests/device/async_device.h"
#include "tests/harness.h"

using namespace sing;
using namespace sing::test;

namespace {

using Floats = std::vector<float>;

constexpr const char* kAsserted = "CUDA error: device-side assert triggered";

// A program whose log has one operator that faults each time, as an index out of range does.
class Program {
 public:
  Program() {
    AsyncDevice::at().reset();
    host.options.device = AsyncDevice::device();
    gather_ = host.define("aten::gather");
    add_ = host.define("aten::add_", "Scalar");
    graph_ = host.define("sing::run_graph");
    x = host.upload({1, 2, 3}, {3});
    host.start();
  }

  void add() { host.call(CallRecord(add_, 3, 1).tensor(x).real(1).integer(1).returns_nothing()); }
  // Returns the position of the record, and the number of its result in `into`.
  uint64_t fault(Tensor* into = nullptr) {
    const Tensor index = host.upload_indices({9}, {1});
    const uint64_t position = host.head();
    const Tensor found{host.next_id(), {1}};
    host.call(
        CallRecord(gather_, 4, 1).tensor(x).integer(0).tensor(index).boolean(false).returns(found));
    if (into) *into = found;
    return position;
  }
  uint64_t run_graph() {
    const uint64_t position = host.head();
    const Tensor found{host.next_id(), {3}};
    CallRecord record(graph_, 5, 1);
    record.tensor(x).string("digest").tensors({}).tensors({x}).integers({});
    record.writer().put(Tag::list);
    record.writer().put<uint32_t>(1);
    host.call(record.returns(found));
    return position;
  }

  // Waits until all records were begun.
  void wait_begun() {
    while (host.worker().consumed.load() != host.head()) std::this_thread::yield();
  }
  // What the agent does: another process, which is careful up to a position.
  void another_worker(uint64_t careful_until) {
    AsyncDevice::at().reset();
    ++host.options.epoch;
    host.options.careful_until = careful_until;
    host.start();
  }
  // The record at fault is found, and skipped. Returns the device's words.
  void recover(const DeviceLost& first, uint64_t culprit, const std::string& operation) {
    const uint64_t careful_until = std::min(first.position + 1, host.head());
    another_worker(careful_until);
    const DeviceLost precise = host.lost();
    EXPECT_EQ(precise.position, culprit);
    EXPECT_EQ(precise.operation, operation);
    EXPECT_EQ(host.worker().consumed.load(), culprit);
    host.options.skip[culprit] = {precise.what()};
    another_worker(careful_until);
  }

  Host host;
  Tensor x;

 private:
  uint32_t gather_, add_, graph_;
};

bool device_ran_ahead(Program& program) {
  AsyncDevice& device = AsyncDevice::at();
  program.wait_begun();
  device.synchronize();
  device.hold(true);
  for (int i = 0; i < 5; ++i) program.add();
  program.wait_begun();
  const bool ahead = device.queued() >= 5;
  device.hold(false);
  return ahead;
}

}  // namespace

TEST(a_late_fault_is_found_by_a_careful_worker_and_skipped) {
  Program program;
  Host& host = program.host;
  AsyncDevice::at().hold(true);
  Tensor broken;
  const uint64_t culprit = program.fault(&broken);
  for (int i = 0; i < 3; ++i) program.add();
  program.wait_begun();
  AsyncDevice::at().hold(false);
  EXPECT_THROWS(c10::Error, AsyncDevice::at().synchronize());
  const uint64_t later = host.head();
  program.add();
  const DeviceLost lost = host.lost();
  EXPECT_EQ(lost.position, later);
  EXPECT_EQ(lost.code, 710);
  EXPECT(std::string(lost.what()).starts_with(kAsserted));
  program.recover(lost, culprit, "aten::gather");
  const Answer answer = host.synchronize();
  EXPECT_EQ(answer.operation(), std::string("aten::gather"));
  EXPECT(answer.message().starts_with(kAsserted));
  EXPECT_EQ(host.values(program.x), (Floats{5, 6, 7}));
  EXPECT_EQ(host.read(broken).kind(), ErrorKind::lost_operand);
  EXPECT(device_ran_ahead(program));
}

TEST(a_fault_that_is_not_read_is_noticed_while_the_worker_is_idle) {
  Program program;
  program.add();
  const uint64_t culprit = program.fault();
  const DeviceLost lost = program.host.lost();
  EXPECT_EQ(lost.position, program.host.head());
  program.recover(lost, culprit, "aten::gather");
  program.wait_begun();
  const int fd = program.host.snapshot();  // its session can be suspended
  EXPECT(fd >= 0);
  close(fd);
  EXPECT(program.host.synchronize().message().starts_with(kAsserted));
  EXPECT_EQ(program.host.values(program.x), (Floats{2, 3, 4}));
}

TEST(a_failure_is_not_reported_before_a_fault_that_came_first) {
  Program program;
  Host& host = program.host;
  AsyncDevice::at().hold(true);
  const uint64_t culprit = program.fault();
  Tensor wrong = program.x;  // no square matrix: it fails at once
  wrong.sizes = {1, 3};
  const Tensor lost{host.next_id(), {1, 3}};
  host.call(CallRecord(host.define("aten::mm"), 2, 1).tensor(wrong).tensor(wrong).returns(lost));
  AsyncDevice::at().hold(false);
  const DeviceLost late = host.lost();
  program.recover(late, culprit, "aten::gather");
  EXPECT_EQ(host.synchronize().operation(), std::string("aten::gather"));
}

TEST(a_snapshot_and_the_end_of_a_lease_notice_a_lost_device) {
  for (const bool snapshot : {true, false}) {
    Program program;
    Host& host = program.host;
    program.fault();
    program.wait_begun();
    try {
      if (snapshot) {
        host.snapshot();
      } else {
        host.session().gate(false);
        host.session().await_parked();
      }
      throw CheckFailed("the device was not lost");
    } catch (const DeviceLost& lost) {
      EXPECT_EQ(lost.position, host.head());
      EXPECT_EQ(lost.code, 710);
    }
    host.stop();
  }
}

TEST(whatever_text_a_library_reports_the_device_is_asked) {
  for (const auto form : {DeviceFault::Form::error, DeviceFault::Form::standard}) {
    Program program;
    Host& host = program.host;
    host.wait_consumed();
    AsyncDevice::at().fail_kernel(0, {719, "CUBLAS_STATUS_EXECUTION_FAILED", form});
    program.add();
    EXPECT_THROWS(std::runtime_error, host.values(program.x));
    const DeviceLost lost = host.lost();
    EXPECT_EQ(lost.code, 719);
    // It does not come again: nothing is skipped.
    program.another_worker(lost.position + 1);
    EXPECT_EQ(host.values(program.x), (Floats{2, 3, 4}));
  }
}

namespace {

// A graph of torch.compile: Python reports its failure as a text.
std::tuple<std::vector<at::Tensor>, std::string> run_graph(const at::Tensor&, c10::string_view,
                                                           at::TensorList, at::TensorList inputs,
                                                           at::IntArrayRef) {
  AsyncDevice::at().fail_kernel(0);
  try {
    inputs[0].add_(1);
    AsyncDevice::at().synchronize();
  } catch (const c10::Error& error) {
    return {std::vector<at::Tensor>(), "Triton Error [CUDA]: device-side assert triggered"};
  }
  return {std::vector<at::Tensor>{inputs[0]}, ""};
}

}  // namespace

TORCH_LIBRARY_IMPL(sing, PrivateUse1, library) { library.impl("run_graph_here", &run_graph); }

TEST(a_fault_in_a_compiled_graph_loses_the_device) {
  Program program;
  const uint64_t culprit = program.run_graph();
  program.add();
  const DeviceLost lost = program.host.lost();
  EXPECT_EQ(lost.position, culprit);
  EXPECT_EQ(lost.operation, std::string("sing::run_graph"));
  program.recover(lost, culprit, "sing::run_graph");
  EXPECT_EQ(program.host.synchronize().operation(), std::string("sing::run_graph"));
  EXPECT_EQ(program.host.values(program.x), (Floats{2, 3, 4}));
}
