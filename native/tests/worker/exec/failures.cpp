// Failures of operators: what the notebook receives, and what remains of its tensors.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <optional>

#include "tests/check.h"
#include "tests/harness.h"

using namespace sing;
using namespace sing::test;

namespace {

using Floats = std::vector<float>;

struct Ops {
  explicit Ops(Host& host)
      : add(host.define("aten::add", "Tensor")),
        add_(host.define("aten::add_", "Tensor")),
        mm(host.define("aten::mm")),
        zero_(host.define("aten::zero_")),
        fill_(host.define("aten::fill_", "Scalar")),
        host_(host) {}

  // Multiplies matrices whose shapes do not match: it fails in the worker.
  Tensor broken() {
    const auto a = host_.upload({1, 2, 3, 4, 5, 6}, {2, 3});
    const Tensor result{host_.next_id(), {2, 2}};
    host_.call(CallRecord(mm, 2, 1).tensor(a).tensor(a).returns(result));
    return result;
  }
  Tensor sum(const Tensor& a, const Tensor& b) {
    const Tensor result{host_.next_id(), a.sizes};
    host_.call(CallRecord(add, 3, 1).tensor(a).tensor(b).integer(1).returns(result));
    return result;
  }
  void increase(const Tensor& a, const Tensor& by) {
    host_.call(CallRecord(add_, 3, 1).tensor(a).tensor(by).integer(1).returns_nothing());
  }
  void zero(const Tensor& a) { host_.call(CallRecord(zero_, 1, 1).tensor(a).returns_nothing()); }

  uint32_t add, add_, mm, zero_, fill_;

 private:
  Host& host_;
};

}  // namespace

TEST(a_failure_names_its_operator_at_the_next_request_and_only_there) {
  Host host;
  host.start();
  Ops ops(host);
  const auto broken = ops.broken();
  const auto answer = host.synchronize();
  EXPECT(!answer.ok());
  EXPECT_EQ(answer.kind(), ErrorKind::runtime);
  EXPECT_EQ(answer.operation(), std::string("aten::mm"));
  EXPECT(answer.message().find("cannot be multiplied") != std::string::npos);
  EXPECT(host.synchronize().ok());
  const auto read = host.read(broken);
  EXPECT_EQ(read.kind(), ErrorKind::lost_operand);
  EXPECT_EQ(read.operation(), std::string("aten::mm"));
}

TEST(what_depends_on_a_lost_result_is_lost_too) {
  Host host;
  host.start();
  Ops ops(host);
  const auto broken = ops.broken();
  const auto dependent = ops.sum(broken, broken);
  EXPECT(!host.synchronize().ok());
  const auto later = ops.sum(dependent, dependent);
  EXPECT(host.synchronize().ok());  // nothing was changed in place
  const auto read = host.read(later);
  EXPECT_EQ(read.kind(), ErrorKind::lost_operand);
  EXPECT_EQ(read.operation(), std::string("aten::mm"));
}

TEST(a_lost_storage_that_is_resized_has_the_new_size_although_an_operator_took_memory_for_it) {
  Host host;
  host.start();
  Ops ops(host);
  Tensor lost = ops.broken();
  const auto a = host.upload({1, 2}, {2}), b = host.upload({1, 2, 3}, {3});
  const auto add_out = host.define("aten::add", "out");
  host.call(
      CallRecord(add_out, 4, 1).tensor(a).tensor(b).integer(1).tensor(lost).returns_nothing());
  EXPECT(!host.synchronize().ok());
  Writer resize;
  resize.put<uint64_t>(lost.id);
  lost.sizes = {1 << 16};
  resize.put<uint64_t>(lost.bytes());
  host.append(RecordKind::resize, 0, resize);
  EXPECT_EQ(host.read(lost).kind(), ErrorKind::lost_operand);
  const uint64_t before = host.worker().memory_resident.load();
  host.call(CallRecord(ops.fill_, 2, 1).tensor(lost).real(3).returns_nothing());
  EXPECT(host.values(lost) == Floats(1 << 16, 3));
  EXPECT_EQ(host.worker().memory_resident.load() - before, lost.bytes());
}

TEST(weights_survive_a_step_with_lost_gradients) {
  Host host;
  host.start();
  Ops ops(host);
  const auto weight = host.upload({1, 1, 1, 1}, {2, 2});
  const auto momentum = host.upload({5, 5, 5, 5}, {2, 2});
  const auto gradient = ops.broken();
  ops.increase(momentum, gradient);  // skipped
  ops.increase(weight, momentum);    // skipped as well: momentum is stale
  EXPECT(!host.synchronize().ok());
  EXPECT(host.values(weight) == (Floats{1, 1, 1, 1}));
  EXPECT(host.values(momentum) == (Floats{5, 5, 5, 5}));
  ops.increase(weight, momentum);
  EXPECT(host.values(weight) == (Floats{6, 6, 6, 6}));
}

TEST(a_change_in_place_by_a_lost_operand_is_an_error_of_its_own) {
  Host host;
  host.start();
  Ops ops(host);
  const auto weight = host.upload({1, 1, 1, 1}, {2, 2});
  const auto broken = ops.broken();
  EXPECT(!host.synchronize().ok());
  ops.increase(weight, broken);
  const auto answer = host.synchronize();
  EXPECT_EQ(answer.kind(), ErrorKind::lost_operand);
  EXPECT_EQ(answer.operation(), std::string("aten::mm"));
  EXPECT(host.values(weight) == (Floats{1, 1, 1, 1}));
}

TEST(what_is_overwritten_as_a_whole_is_good_again) {
  Host host;
  host.start();
  Ops ops(host);
  const auto zeroed = ops.broken();
  const auto uploaded = ops.broken();
  EXPECT(!host.synchronize().ok());
  ops.zero(zeroed);
  EXPECT(host.values(zeroed) == (Floats{0, 0, 0, 0}));
  const Floats values = {1, 2, 3, 4};
  host.write(uploaded, values.data());
  EXPECT(host.values(uploaded) == values);
}

TEST(an_out_operand_of_a_failed_call_holds_nothing) {
  Host host;
  host.start();
  const auto mm = host.define("aten::mm", "out");
  const auto a = host.upload({1, 2, 3, 4, 5, 6}, {2, 3});
  const auto out = host.allocate({2, 2});
  host.call(CallRecord(mm, 3, 1).tensor(a).tensor(a).tensor(out).returns_nothing());
  EXPECT(!host.synchronize().ok());
  EXPECT_EQ(host.read(out).kind(), ErrorKind::lost_operand);
}

TEST(a_failed_change_of_nothing_loses_nothing) {
  Host host;
  host.start();
  const auto mm = host.define("aten::mm", "out"), fill = host.define("aten::fill_", "Tensor");
  const auto a = host.upload({1, 2, 3, 4, 5, 6}, {2, 3});
  const auto empty = host.allocate({0, 3});
  host.call(CallRecord(mm, 3, 1).tensor(a).tensor(a).tensor(empty).returns_nothing());
  EXPECT(!host.synchronize().ok());
  const auto one = host.upload({1}, {});
  host.call(CallRecord(fill, 2, 1).tensor(empty).tensor(one).returns_nothing());
  EXPECT(host.synchronize().ok());
}

TEST(a_failing_request_reports_itself) {
  Host host;
  host.start();
  Ops ops(host);
  const auto a = host.upload({1, 2, 3, 4, 5, 6}, {2, 3});
  const auto answer =
      host.request_call(CallRecord(ops.mm, 2, 1).tensor(a).tensor(a).returns_number(50));
  EXPECT_EQ(answer.operation(), std::string("aten::mm"));
  EXPECT(host.synchronize().ok());
}

TEST(errors_keep_their_types) {
  Host host;
  host.start();
  const auto select = host.define("aten::index_select");
  const auto a = host.upload({1, 2, 3}, {3});
  Tensor index{host.next_id(), {1}, at::ScalarType::Long};
  host.allocate(index.id, 8);
  const int64_t nine = 9;
  host.write(index, &nine);
  Tensor result{host.next_id(), {1}};
  host.call(CallRecord(select, 3, 1).tensor(a).integer(0).tensor(index).returns(result));
  EXPECT_EQ(host.synchronize().kind(), ErrorKind::index);
  const auto cholesky = host.define("aten::linalg_cholesky");
  const auto b = host.upload({-1, 0, 0, -1}, {2, 2});
  result = {host.next_id(), {2, 2}};
  host.call(CallRecord(cholesky, 2, 1).tensor(b).boolean(false).returns(result));
  EXPECT_EQ(host.synchronize().kind(), ErrorKind::linear_algebra);
}

TEST(an_unknown_operator_is_an_error_of_its_calls) {
  Host host;
  host.start();
  const auto op = host.define("nobody::has_this", "one");
  host.wait_consumed();
  const auto a = host.upload({1}, {1});
  const Tensor result{host.next_id(), {1}};
  host.call(CallRecord(op, 1, 1).tensor(a).returns(result));
  const auto answer = host.synchronize();
  EXPECT_EQ(answer.operation(), std::string("nobody::has_this.one"));
  EXPECT(host.values(a) == (Floats{1}));
}

TEST(values_that_do_not_fit_are_an_error_of_the_call) {
  Host host;
  host.start();
  Ops ops(host);
  const auto a = host.upload({1}, {1});
  const Tensor result{host.next_id(), {1}};
  host.call(CallRecord(ops.add, 3, 1).tensor(a).integers({1, 2}).integer(1).returns(result));
  EXPECT(!host.synchronize().ok());
  host.call(CallRecord(ops.add, 2, 1).tensor(a).tensor(a).returns(result));
  EXPECT(!host.synchronize().ok());
  host.call(CallRecord(ops.add, 3, 1).string("x").tensor(a).integer(1).returns(result));
  EXPECT(!host.synchronize().ok());
  EXPECT(host.values(a) == (Floats{1}));
}

TEST(a_wrong_prediction_is_an_error_that_names_the_operator) {
  Host host;
  host.start();
  Ops ops(host);
  const auto a = host.upload({1, 2}, {2});
  const Tensor result{host.next_id(), {3}};
  host.call(CallRecord(ops.add, 3, 1).tensor(a).tensor(a).integer(1).returns(result));
  const auto answer = host.synchronize();
  EXPECT_EQ(answer.operation(), std::string("aten::add.Tensor"));
  EXPECT(answer.message().find("internal") != std::string::npos);
}

TEST(memory_beyond_the_grant_is_refused_and_comes_back_with_room) {
  Host host;
  host.grant(4096);
  host.start();
  Ops ops(host);
  const auto large = host.allocate({1025});
  host.call(CallRecord(ops.fill_, 2, 1).tensor(large).integer(1).returns_nothing());
  const auto answer = host.synchronize();
  EXPECT_EQ(answer.kind(), ErrorKind::out_of_memory);
  EXPECT_EQ(answer.operation(), std::string("aten::fill_.Scalar"));
  const auto fits = host.allocate({1024});
  host.call(CallRecord(ops.fill_, 2, 1).tensor(fits).integer(1).returns_nothing());
  EXPECT(host.synchronize().ok());
  const Tensor result{host.next_id(), {1024}};
  host.call(CallRecord(ops.add, 3, 1).tensor(fits).tensor(fits).integer(1).returns(result));
  EXPECT_EQ(host.synchronize().kind(), ErrorKind::out_of_memory);
  host.grant(8192);
  const auto again = ops.sum(fits, fits);
  EXPECT(host.values(again) == Floats(1024, 2));
}

TEST(a_call_on_the_skip_list_is_not_executed) {
  Host host;
  Ops ops(host);
  const auto a = host.upload({1}, {1});
  host.options.skip = {{host.head(), {"it crashed"}}};
  ops.zero(a);
  host.start();
  const auto answer = host.synchronize();
  EXPECT_EQ(answer.operation(), std::string("aten::zero_"));
  EXPECT_EQ(answer.message(), std::string("it crashed"));
  EXPECT(host.values(a) == (Floats{1}));
}

TEST(records_that_want_more_memory_than_the_machine_has_say_so) {
  Host host;
  Ops ops(host);
  const auto a = host.upload({1}, {1});
  const auto b = host.allocate({1});
  host.options.skip = {{host.head(), {"it was killed", true}}};
  const float two = 2;
  host.write(b, &two);
  host.start();
  const auto answer = host.synchronize();
  EXPECT_EQ(answer.kind(), ErrorKind::out_of_host_memory);
  EXPECT_EQ(answer.operation(), std::string("a copy to the device"));
  EXPECT(host.values(a) == (Floats{1}));
  EXPECT_EQ(host.read(b).kind(), ErrorKind::lost_operand);
}

namespace {

// A device that answers as the test wants when it is asked to synchronise.
constexpr c10::DeviceType kAsked = c10::DeviceType::MAIA;
std::vector<int32_t> replies;  // codes of errors; 0: none. The last one stays.
int questions = 0;

struct AskedGuard final : c10::impl::NoOpDeviceGuardImpl<kAsked> {
  void synchronizeDevice(const c10::DeviceIndex) const override {
    const int32_t code = replies.empty() ? 0 : replies.front();
    if (replies.size() > 1) replies.erase(replies.begin());
    ++questions;
    if (code == 0) return;
    const std::string words = "CUDA error: device-side assert triggered\nDebug it like this.";
    if (code < 0) TORCH_CHECK(false, words);  // by a library without codes
    throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, code, words);
  }
};

const c10::impl::DeviceGuardImplRegistrar registrar(kAsked, new AskedGuard);

// What becomes of an exception on a device with these replies: the code of a lost one, or nothing.
template <class Throw>
std::optional<int32_t> loss(c10::Device device, std::vector<int32_t> told, Throw raise) {
  replies = std::move(told);
  try {
    try {
      raise();
    } catch (...) {
      EXPECT_EQ(describe_exception(device, 8, "aten::add").operation, std::string("aten::add"));
    }
  } catch (const DeviceLost& lost) {
    EXPECT_EQ(lost.position, uint64_t{8});
    EXPECT_EQ(lost.operation, std::string("aten::add"));
    EXPECT_EQ(std::string(lost.what()), std::string("CUDA error: device-side assert triggered"));
    return lost.code;
  }
  return std::nullopt;
}

void raise_text(const char* text) { TORCH_CHECK(false, text); }

}  // namespace

TEST(a_device_that_is_lost_ends_the_run_and_is_no_failure_of_an_operator) {
  const auto lost_by = [](int32_t code) {
    return loss(at::kCPU, {0}, [&] {
             throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, code,
                                         "CUDA error: device-side assert triggered\nDebug it.");
           }) == code;
  };
  EXPECT(lost_by(710));   // a kernel asserted
  EXPECT(lost_by(700));   // an illegal address
  EXPECT(lost_by(214));   // memory that cannot be corrected
  EXPECT(!lost_by(1));    // an invalid value
  EXPECT(!lost_by(98));   // an invalid device function
  EXPECT(!lost_by(209));  // no kernel for this GPU
}

TEST(lack_of_device_memory_is_recognised_in_the_words_of_libraries) {
  for (const char* text :
       {"CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"}) {
    try {
      raise_text(text);
    } catch (...) {
      const Failure failure = describe_exception(at::kCPU, 8, "aten::mm");
      EXPECT_EQ(failure.kind, ErrorKind::out_of_memory);
      EXPECT_EQ(failure.message, std::string(text));
    }
  }
}

TEST(whatever_the_error_says_a_device_that_fails_when_it_is_asked_is_lost) {
  const c10::Device device(kAsked, 0);
  for (const char* text :
       {"CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "cusolver error: CUSOLVER_STATUS_INTERNAL",
        "Triton Error [CUDA]: device-side assert triggered", "RuntimeError: of a graph"}) {
    const auto raise = [&] { raise_text(text); };
    EXPECT(loss(device, {710}, raise) == 710);
    EXPECT(loss(device, {-1}, raise) == 0);
    EXPECT(loss(device, {0}, raise) == std::nullopt);
  }
  EXPECT(loss(device, {719}, [] { throw 1; }) == 719);
}

TEST(an_error_of_a_device_that_does_not_come_again_is_a_failure_of_the_operator) {
  const auto raise = [] { raise_text("some"); };
  EXPECT(loss(c10::Device(kAsked, 0), {9, 0}, raise) == std::nullopt);
  EXPECT(loss(c10::Device(kAsked, 0), {9, 9}, raise) == 9);
}

TEST(a_software_device_is_not_asked) {
  questions = 0;
  EXPECT(loss(at::kCPU, {710}, [] { raise_text("some"); }) == std::nullopt);
  EXPECT_EQ(questions, 0);
}
