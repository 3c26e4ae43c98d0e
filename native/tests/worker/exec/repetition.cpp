// Requests that are executed again and give another result: the notebook has tensors of the sizes
// that were answered before.
#include "tests/check.h"
#include "tests/harness.h"

using namespace sing;
using namespace sing::test;

namespace {

using Floats = std::vector<float>;
using Indices = std::vector<int64_t>;

// A tensor of four numbers, of which `count` are ones and the others zeros; rewrite() changes that
// in the log, so that the next worker computes something else, as on a device that is not exact.
class Flags {
 public:
  explicit Flags(Host& host, int count) : host_(host) {
    less_ = host.define("aten::lt", "Scalar_out");
    const auto arange = host.upload({0, 1, 2, 3}, {4});
    numbers_ = arange;
    flags_ = host.allocate({4}, at::ScalarType::Bool);
    end_ = host.call(comparison(count));
  }
  void rewrite(int count) { host_.replace(end_, comparison(count)); }
  const Tensor& flags() const { return flags_; }
  const Tensor& numbers() const { return numbers_; }

 private:
  CallRecord comparison(int count) const {
    return std::move(
        CallRecord(less_, 3, 1).tensor(numbers_).integer(count).tensor(flags_).returns_nothing());
  }
  Host& host_;
  uint32_t less_;
  uint64_t end_ = 0;
  Tensor numbers_, flags_;
};

Indices indices(Host& host, const Tensor& tensor) {
  const Answer answer = host.read(tensor);
  if (!answer.ok()) throw std::runtime_error("read failed: " + answer.message());
  Indices values(answer.bytes.size() / sizeof(int64_t));
  std::memcpy(values.data(), answer.bytes.data(), answer.bytes.size());
  return values;
}

// Returns what is left of the selected numbers (three at first) if another count is selected again.
Floats selected_again(int count, bool recorded, uint64_t diverged) {
  Host host;
  host.start();
  Flags flags(host, 3);
  const auto select = host.define("aten::masked_select");
  const auto add = host.define("aten::add_", "Scalar");
  const Tensor selected{host.next_id(), {3}};
  CallRecord call(select, 2, 1);
  call.tensor(flags.numbers()).tensor(flags.flags()).returns_number(selected.id);
  if (recorded) {
    EXPECT(host.request_recorded(call).ok());
    host.call(CallRecord(add, 3, 1).tensor(selected).integer(10).integer(1).returns_nothing());
    host.wait_consumed();
    host.stop();
  } else {  // the client has the answer, but has not written its record yet
    const uint64_t position = host.begin_request(RecordKind::call, call.payload());
    host.wait_answer(position);
    host.stop();
    flags.rewrite(count);
    host.start();
    while (host.worker().consumed.load() != host.head()) sched_yield();
    Answer answer;
    host.take(answer.bytes, 1 << 20);
    host.record_answer(position, answer);
    host.client().answer_wanted.store(0);
    host.call(CallRecord(add, 3, 1).tensor(selected).integer(10).integer(1).returns_nothing());
    host.wait_consumed();
    host.stop();
  }
  flags.rewrite(count);
  host.start();
  const Floats values = host.values(selected);
  EXPECT_EQ(host.session().state().diverged, diverged);
  return values;
}

}  // namespace

TEST(a_result_that_is_larger_when_computed_again_is_cut) {
  EXPECT(selected_again(4, true, 1) == (Floats{10, 11, 12}));
}

TEST(a_result_that_is_smaller_when_computed_again_is_padded_with_zeros) {
  EXPECT(selected_again(2, true, 1) == (Floats{10, 11, 10}));
  EXPECT(selected_again(0, true, 1) == (Floats{10, 10, 10}));
}

TEST(a_result_that_is_the_same_when_computed_again_has_not_diverged) {
  EXPECT(selected_again(3, true, 0) == (Floats{10, 11, 12}));
}

TEST(an_answer_without_its_record_binds_the_next_worker_too) {
  EXPECT(selected_again(4, false, 1) == (Floats{10, 11, 12}));
  EXPECT(selected_again(2, false, 1) == (Floats{10, 11, 10}));
}

TEST(the_rows_of_a_result_in_columns_stay_rows) {
  Host host;
  host.start();
  const auto fill = host.define("aten::fill_", "Scalar");
  const auto nonzero = host.define("aten::nonzero");
  const Tensor square = host.upload({0, 1, 0, 1}, {2, 2});
  Geometry row = contiguous(square);
  row.sizes = {2};
  row.strides = {1};
  const auto first_row = [&](int64_t value) {
    return std::move(
        CallRecord(fill, 2, 1).tensor(square.id, row).integer(value).returns_nothing());
  };
  const uint64_t end = host.call(first_row(1));
  const Tensor found{host.next_id(), {3, 2}, at::ScalarType::Long};
  const Answer answer =
      host.request_recorded(CallRecord(nonzero, 1, 1).tensor(square).returns_number(found.id));
  EXPECT(answer.ok());
  Reader in(answer.bytes);
  in.get<Tag>();
  in.get<uint32_t>();
  in.get<uint64_t>();
  const Geometry geometry = get_geometry(in);
  EXPECT_EQ(geometry.sizes[0], 3);
  host.wait_consumed();
  host.stop();
  host.replace(end, first_row(0));  // one nonzero is left, in the second row and column
  host.start();
  // The rows lie as they were answered: (1, 1) comes first, zeros follow.
  Indices expected(6, 0);
  expected[0] = 1;
  expected[static_cast<size_t>(geometry.strides[1])] = 1;
  EXPECT(indices(host, found) == expected);
}

TEST(an_operand_that_grew_has_the_answered_size_again) {
  for (const int count : {1, 3, 4}) {
    Host host;
    host.start();
    Flags flags(host, 3);
    const auto nonzero = host.define("aten::nonzero", "out");
    const Tensor out = host.allocate({0}, at::ScalarType::Long);
    EXPECT(host.request_recorded(
                   CallRecord(nonzero, 2, 1).tensor(flags.flags()).tensor(out).returns_nothing())
               .ok());
    const Tensor grown{out.id, {3, 1}, at::ScalarType::Long};
    EXPECT(indices(host, grown) == (Indices{0, 1, 2}));
    host.stop();
    flags.rewrite(count);
    host.start();
    EXPECT(indices(host, grown) == (Indices{0, count > 1 ? 1 : 0, count > 2 ? 2 : 0}));
    EXPECT_EQ(host.session().state().diverged, count == 3 ? 0U : 1U);
  }
}

TEST(a_sparse_result_of_another_size_is_lost) {
  Host host;
  host.start();
  const auto mul = host.define("aten::mul_", "Scalar");
  const auto to_sparse = host.define("aten::_to_sparse");
  const Tensor dense = host.upload({1, 2, 3, 4}, {4});
  const auto times = [&](int64_t value) {
    return std::move(CallRecord(mul, 2, 1).tensor(dense).integer(value).returns_nothing());
  };
  const uint64_t end = host.call(times(1));
  const std::array<uint32_t, 3> numbers{host.next_id(), host.next_id(), host.next_id()};
  const Answer answer = host.request_recorded(
      CallRecord(to_sparse, 4, 1).tensor(dense).none().none().none().returns_numbers(numbers));
  EXPECT(answer.ok());
  host.wait_consumed();
  host.stop();
  host.replace(end, times(0));
  host.start();
  const Answer read = host.read({numbers[1], {4}});
  EXPECT(!read.ok() && read.kind() == ErrorKind::lost_operand);
  EXPECT_EQ(host.session().state().diverged, 1U);
  EXPECT(host.values(dense) == (Floats{0, 0, 0, 0}));  // the session continues
}

TEST(a_failure_that_occurs_only_when_computed_again_is_reported_by_the_next_request) {
  Host host;
  host.start();
  const auto fill = host.define("aten::fill_", "Scalar");
  const auto index_select = host.define("aten::index_select");
  const auto select = host.define("aten::masked_select");
  Flags flags(host, 2);
  const Tensor index = host.allocate({1}, at::ScalarType::Long);
  const auto filled = [&](int64_t value) {
    return std::move(CallRecord(fill, 2, 1).tensor(index).integer(value).returns_nothing());
  };
  const uint64_t end = host.call(filled(1));
  const Tensor item{host.next_id(), {1}};
  host.call(CallRecord(index_select, 3, 1)
                .tensor(flags.numbers())
                .integer(0)
                .tensor(index)
                .returns(item));
  const Tensor selected{host.next_id(), {2}};
  EXPECT(host.request_recorded(CallRecord(select, 2, 1)
                                   .tensor(flags.numbers())
                                   .tensor(flags.flags())
                                   .returns_number(selected.id))
             .ok());
  EXPECT(host.values(item) == (Floats{1}));
  host.stop();
  host.replace(end, filled(9));
  host.start();
  const Answer failure = host.synchronize();
  EXPECT_EQ(failure.operation(), std::string("aten::index_select"));
  EXPECT(host.values(selected) == (Floats{0, 1}));
}

TEST(a_request_that_fails_only_when_computed_again_loses_its_results) {
  Host host;
  host.start();
  const auto fill = host.define("aten::fill_", "Scalar");
  const auto repeat = host.define("aten::repeat_interleave", "self_Tensor");
  const Tensor values = host.upload({5}, {1});
  const Tensor times = host.allocate({1}, at::ScalarType::Long);
  const auto filled = [&](int64_t value) {
    return std::move(CallRecord(fill, 2, 1).tensor(times).integer(value).returns_nothing());
  };
  const uint64_t end = host.call(filled(2));
  const Tensor repeated{host.next_id(), {2}};
  EXPECT(host.request_recorded(CallRecord(repeat, 4, 1)
                                   .tensor(values)
                                   .tensor(times)
                                   .none()
                                   .none()
                                   .returns_number(repeated.id))
             .ok());
  EXPECT(host.values(repeated) == (Floats{5, 5}));
  host.stop();
  host.replace(end, filled(-1));
  host.start();
  EXPECT(!host.synchronize().ok());
  const Answer read = host.read(repeated);
  EXPECT(!read.ok() && read.kind() == ErrorKind::lost_operand);
  EXPECT(host.values(values) == (Floats{5}));
}
