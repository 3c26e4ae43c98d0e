// Executor: what the worker does with well-formed records.
#include <numeric>

#include "oplog/futex.h"
#include "tests/check.h"
#include "tests/harness.h"

using namespace sing;
using namespace sing::test;

namespace {

using Floats = std::vector<float>;

Floats ramp(size_t count) {
  Floats values(count);
  std::iota(values.begin(), values.end(), 0.0f);
  return values;
}

}  // namespace

TEST(an_out_form_fills_a_storage_that_was_only_announced) {
  Host host;
  host.start();
  const auto a = host.upload({1, 2, 3}, {3});
  const auto b = host.upload({10, 20, 30}, {3});
  const auto sum = host.allocate({3});
  const auto add = host.define("aten::add", "out");
  host.call(CallRecord(add, 4, 1).tensor(a).tensor(b).integer(2).tensor(sum).returns_nothing());
  EXPECT(host.values(sum) == (Floats{21, 42, 63}));
}

TEST(a_functional_call_binds_its_result) {
  Host host;
  host.start();
  const auto a = host.upload({1, 2, 3}, {3});
  const auto mul = host.define("aten::mul", "Tensor");
  const Tensor product{host.next_id(), {3}};
  host.call(CallRecord(mul, 2, 1).tensor(a).number(1.5).returns(product));
  EXPECT(host.values(product) == (Floats{1.5, 3, 4.5}));
}

TEST(storages_that_nobody_wrote_are_zeros) {
  Host host;
  host.start();
  const auto fresh = host.allocate({4});
  EXPECT(host.values(fresh) == (Floats{0, 0, 0, 0}));
  const auto added = host.allocate({4});
  const auto add_ = host.define("aten::add_", "Scalar");
  host.call(CallRecord(add_, 3, 1).tensor(added).integer(2).integer(1).returns_nothing());
  EXPECT(host.values(added) == (Floats{2, 2, 2, 2}));
}

TEST(a_fill_of_a_part_leaves_zeros_around_it) {
  Host host;
  host.start();
  const auto whole = host.allocate({2, 3});
  Geometry column;
  column.sizes = {2};
  column.strides = {3};
  column.offset = 1;
  const auto fill = host.define("aten::fill_", "Scalar");
  host.call(CallRecord(fill, 2, 1).tensor(whole.id, column).integer(7).returns_nothing());
  EXPECT(host.values(whole) == (Floats{0, 7, 0, 0, 7, 0}));
}

TEST(uploads_come_in_pieces) {
  Host host;
  host.start();
  const auto tensor = host.allocate({4});
  const Floats values = {1, 2};
  for (const uint64_t offset : {0, 8}) {
    Writer out = read_payload(tensor.id, offset, 8);
    out.put_bytes(values.data(), 8);
    host.append(RecordKind::write, 0, out);
  }
  EXPECT(host.values(tensor) == (Floats{1, 2, 1, 2}));
}

TEST(a_result_that_lies_otherwise_than_predicted_is_put_into_place) {
  Host host;
  host.start();
  const auto a = host.upload(ramp(6), {2, 3});
  const auto add = host.define("aten::add", "Scalar");
  Tensor result{host.next_id(), {2, 3}};
  Geometry by_columns = contiguous(result);
  by_columns.strides = {1, 2};
  by_columns.offset = 1;
  host.call(CallRecord(add, 3, 1).tensor(a).integer(1).integer(1).returns(result, by_columns, 28));
  const auto answer = host.request(RecordKind::read, read_payload(result.id, 0, 28));
  Floats bytes(7);
  std::memcpy(bytes.data(), answer.bytes.data(), 28);
  EXPECT(bytes == (Floats{0, 1, 4, 2, 5, 3, 6}));
}

TEST(a_result_that_is_an_operand_is_copied_when_a_new_one_was_promised) {
  Host host;
  host.start();
  const auto a = host.upload({1, 2}, {2});
  const auto identity = host.define("aten::_to_copy");
  const auto view = host.define("aten::view");
  (void)identity;
  Tensor result{host.next_id(), {2}};
  host.call(CallRecord(view, 2, 1).tensor(a).integers({2}).returns(result));
  const auto zero = host.define("aten::zero_");
  host.call(CallRecord(zero, 1, 1).tensor(a).returns_nothing());
  EXPECT(host.values(result) == (Floats{1, 2}));
}

TEST(results_may_share_a_storage) {
  Host host;
  host.start();
  const auto a = host.upload(ramp(6), {6});
  const auto chunk = host.define("aten::unsafe_chunk");
  const auto clone = host.define("aten::clone");
  Tensor copy{host.next_id(), {6}};
  host.call(CallRecord(clone, 2, 1).tensor(a).none().returns(copy));
  // As a request, the worker reports that both are parts of the operand.
  CallRecord record(chunk, 3, 1);
  record.tensor(copy).integer(2).integer(0);
  record.writer().put(Tag::list);
  record.writer().put<uint32_t>(2);
  record.writer().put<uint32_t>(host.next_id());
  record.writer().put<uint32_t>(host.next_id());
  const auto answer = host.request_call(record);
  EXPECT(answer.ok());
  Reader in(answer.bytes);
  EXPECT_EQ(in.get<Tag>(), Tag::list);
  EXPECT_EQ(in.get<uint32_t>(), 2u);
  for (const int64_t offset : {0, 3}) {
    EXPECT_EQ(in.get<Tag>(), Tag::alias);
    EXPECT_EQ(in.get<uint32_t>(), copy.id);
    EXPECT_EQ(get_geometry(in).offset, offset);
  }
}

TEST(a_request_answers_the_geometry_of_its_results) {
  Host host;
  host.start();
  const auto a = host.upload({0, 5, 0, 7}, {4});
  const auto nonzero = host.define("aten::nonzero");
  const uint32_t id = host.next_id();
  const auto answer = host.request_call(CallRecord(nonzero, 1, 1).tensor(a).returns_number(id));
  EXPECT(answer.ok());
  Reader in(answer.bytes);
  EXPECT_EQ(in.get<Tag>(), Tag::tensor);
  EXPECT_EQ(in.get<uint32_t>(), id);
  const uint64_t bytes = in.get<uint64_t>();
  const Geometry geometry = get_geometry(in);
  EXPECT(geometry.sizes == (Dimensions{2, 1}));
  EXPECT_EQ(geometry.dtype, at::ScalarType::Long);
  EXPECT_EQ(in.get<uint32_t>(), 0u);
  EXPECT(in.ok());
  const auto read = host.request(RecordKind::read, read_payload(id, 0, bytes));
  int64_t indices[2];
  std::memcpy(indices, read.bytes.data(), sizeof(indices));
  EXPECT(indices[0] + indices[1] == 4);
}

TEST(a_request_answers_numbers) {
  Host host;
  host.start();
  const auto a = host.upload({2.5}, {});
  const auto item = host.define("aten::_local_scalar_dense");
  const auto answer = host.request_call(CallRecord(item, 1, 1).tensor(a).returns_nothing());
  Reader in(answer.bytes);
  EXPECT_EQ(in.get<Tag>(), Tag::real);
  EXPECT_EQ(in.get<double>(), 2.5);
}

TEST(a_request_tells_how_out_operands_were_resized) {
  Host host;
  host.start();
  const auto a = host.upload({0, 5, 7}, {3});
  const Tensor out{host.next_id(), {0}, at::ScalarType::Long};
  host.allocate(out.id, 0);
  const auto nonzero = host.define("aten::nonzero", "out");
  const auto answer =
      host.request_call(CallRecord(nonzero, 2, 1).tensor(a).tensor(out).returns_nothing());
  EXPECT(answer.ok());
  Reader in(answer.bytes);
  EXPECT_EQ(in.get<Tag>(), Tag::none);
  EXPECT_EQ(in.get<uint32_t>(), 1u);
  EXPECT_EQ(in.get<uint16_t>(), uint16_t{1});
  EXPECT_EQ(in.get<uint16_t>(), uint16_t{0});
  EXPECT(in.get<uint64_t>() >= 16);
  EXPECT(get_geometry(in).sizes == (Dimensions{2, 1}));
  EXPECT(in.ok());
}

TEST(lists_of_tensors_are_changed_in_place) {
  Host host;
  host.start();
  const auto a = host.upload({1, 2}, {2});
  const auto b = host.upload({3}, {1});
  const auto add = host.define("aten::_foreach_add_", "Scalar");
  host.call(CallRecord(add, 2, 0).tensors({a, b}).integer(10));
  EXPECT(host.values(a) == (Floats{11, 12}));
  EXPECT(host.values(b) == (Floats{13}));
}

TEST(a_resized_storage_keeps_its_bytes) {
  Host host;
  host.start();
  auto tensor = host.upload({1, 2}, {2});
  Writer out;
  out.put<uint32_t>(tensor.id);
  out.put<uint32_t>(0);
  out.put<uint64_t>(16);
  host.append(RecordKind::resize, 0, out);
  tensor.sizes = {4};
  EXPECT(host.values(tensor) == (Floats{1, 2, 0, 0}));
}

TEST(random_numbers_follow_the_seed) {
  Host host;
  host.start();
  const auto uniform = host.define("aten::uniform_");
  const auto draw = [&](uint32_t generator) {
    const auto tensor = host.allocate({8});
    CallRecord record(uniform, 4, 1);
    record.tensor(tensor).real(0).real(1);
    if (generator == 0) {
      record.none();
    } else {
      record.generator(generator);
    }
    host.call(record.returns_nothing());
    return host.values(tensor);
  };
  host.generator(0, GeneratorAction::seed, 5);
  const auto first = draw(0);
  EXPECT(first != draw(0));
  host.generator(0, GeneratorAction::seed, 5);
  EXPECT(first == draw(0));
  host.generator(3, GeneratorAction::seed, 5);
  EXPECT(first == draw(3));
}

TEST(a_generators_state_is_put_back) {
  Host host;
  host.start();
  host.generator(2, GeneratorAction::seed, 9);
  const Bytes state = host.generator_state(2);
  host.generator(2, GeneratorAction::seed, 10);
  EXPECT(host.generator_state(2) != state);
  Writer out;
  out.put<uint32_t>(2);
  out.put(GeneratorAction::set_state);
  out.put_bytes("\0\0\0", 3);
  out.put<uint64_t>(state.size());
  out.put_bytes(state.data(), state.size());
  host.append(RecordKind::generator, 0, out);
  EXPECT(host.generator_state(2) == state);
}

TEST(time_passes_between_two_events) {
  Host host;
  host.start();
  const auto event = [&](uint32_t number, EventAction action, uint32_t other) {
    Writer out;
    out.put<uint32_t>(number);
    out.put(action);
    out.put_bytes("\0\0\0", 3);
    if (action == EventAction::elapsed) out.put<uint32_t>(other);
    return out;
  };
  host.append(RecordKind::event, 0, event(1, EventAction::record, 0));
  const auto early = host.request(RecordKind::event, event(1, EventAction::elapsed, 2));
  EXPECT(!early.ok());
  host.append(RecordKind::event, 0, event(2, EventAction::record, 0));
  const auto answer = host.request(RecordKind::event, event(1, EventAction::elapsed, 2));
  EXPECT(answer.ok());
  double elapsed = -1;
  std::memcpy(&elapsed, answer.bytes.data(), sizeof(elapsed));
  EXPECT(elapsed > 0);
}

TEST(the_log_may_go_around_its_ring_many_times) {
  Host host(kPageBytes);
  host.start();
  const auto a = host.allocate({4});
  const auto add = host.define("aten::add_", "Scalar");
  for (int i = 0; i < 1000; ++i) {
    host.call(CallRecord(add, 3, 1).tensor(a).integer(1).integer(1).returns_nothing());
    if (i % 10 == 9) {
      host.wait_consumed();
      // The answer comes before the record counts as executed; `retained` may lag.
      host.agent().retained.store(host.worker().consumed.load());
    }
  }
  EXPECT(host.values(a) == (Floats{1000, 1000, 1000, 1000}));
}

TEST(memory_is_accounted_and_given_back) {
  Host host;
  host.start();
  const auto a = host.allocate({1024});
  host.wait_consumed();
  EXPECT_EQ(host.session().state().storages.resident(), uint64_t{0});
  host.values(a);
  host.wait_consumed();
  EXPECT_EQ(host.session().state().storages.resident(), uint64_t{4096});
  host.free(a.id);
  host.wait_consumed();
  EXPECT_EQ(host.session().state().storages.resident(), uint64_t{0});
  host.free(a.id);  // freeing is idempotent
  host.wait_consumed();
}

TEST(a_closed_gate_holds_the_log_back) {
  Host host;
  host.start();
  host.wait_consumed();
  host.session().orders().gate(false);
  uint64_t position = 0;
  close(host.snapshot(&position));
  const auto a = host.upload({1}, {1});
  uint64_t later = 0;
  close(host.snapshot(&later));
  EXPECT_EQ(later, position);
  host.session().orders().gate(true);
  EXPECT(host.values(a) == (Floats{1}));
}
