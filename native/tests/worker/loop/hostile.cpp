// Records and pages that no client writes: the session ends, the worker does not crash.
#include "tests/check.h"
#include "tests/harness.h"

using namespace sing;
using namespace sing::test;

namespace {

std::string end_of(const std::function<void(Host&)>& attack) {
  Host host;
  host.start();
  host.upload({1, 2}, {2});  // storage 1
  host.define("aten::neg");  // operator 1
  attack(host);
  return host.corruption();
}

void expect_end(const char* reason, const std::function<void(Host&)>& attack) {
  const std::string found = end_of(attack);
  if (found.find(reason) == std::string::npos) {
    throw CheckFailed("expected an end with \"" + std::string(reason) + "\", found \"" + found +
                      "\"");
  }
}

}  // namespace

TEST(a_head_that_goes_back_or_too_far_ends_the_session) {
  expect_end("head", [](Host& host) {
    host.wait_consumed();
    host.client().head.store(8);
    host.session().orders().while_parked([] {});  // makes it check again
  });
  expect_end("head", [](Host& host) {
    host.client().head.store(uint64_t{1} << 40);
    host.session().orders().while_parked([] {});
  });
}

TEST(broken_headers_end_the_session) {
  for (const RecordHeader header :
       {RecordHeader{0, 3, 0, 0}, RecordHeader{64, 3, 0, 0}, RecordHeader{12, 3, 0, 0},
        RecordHeader{8, 99, 0, 0}, RecordHeader{8, 3, 0, 7}}) {
    expect_end("header", [&](Host& host) { host.append_raw(&header, sizeof(header)); });
  }
  const RecordHeader flags{8, 7, 0x80, 0};
  expect_end("flags", [&](Host& host) { host.append_raw(&flags, sizeof(flags)); });
}

TEST(tensors_outside_of_their_storage_end_the_session) {
  const auto call = [](uint32_t id, const Geometry& geometry) {
    return [id, geometry](Host& host) {
      host.call(CallRecord(1, 1, 1).tensor(id, geometry).returns({9, {2}}));
    };
  };
  Geometry geometry;
  geometry.sizes = {3};
  geometry.strides = {1};
  expect_end("beyond", call(1, geometry));
  geometry.sizes = {2};
  geometry.offset = 1;
  expect_end("beyond", call(1, geometry));
  geometry.offset = 0;
  expect_end("does not exist", call(2, geometry));
  expect_end("does not exist", call(UINT32_MAX, geometry));
  geometry.sizes = {int64_t{1} << 40, int64_t{1} << 40};
  geometry.strides = {0, 0};
  expect_end("impossible size", call(1, geometry));
  geometry.strides = {-1, 1};
  expect_end("operands", call(1, geometry));
  geometry.sizes = {int64_t{1} << 60};
  geometry.strides = {1};
  expect_end("operands", call(1, geometry));
}

TEST(transfers_outside_of_their_storage_end_the_session) {
  expect_end("beyond",
             [](Host& host) { host.append(RecordKind::read, kRequest, read_payload(1, 0, 9)); });
  expect_end("beyond", [](Host& host) {
    host.append(RecordKind::read, kRequest, read_payload(1, UINT64_MAX, 2));
  });
  expect_end("length", [](Host& host) {
    host.append(RecordKind::write, 0, read_payload(1, 0, 8));  // no bytes follow
  });
}

TEST(payloads_that_end_too_early_or_late_end_the_session) {
  expect_end("without an operator", [](Host& host) { host.append(RecordKind::call, 0, Writer()); });
  expect_end("operands", [](Host& host) { host.call(CallRecord(1, 1, 1)); });
  expect_end("outputs", [](Host& host) { host.call(CallRecord(1, 1, 20).tensor({1, {2}})); });
  expect_end("length", [](Host& host) {
    CallRecord record(1, 1, 1);
    record.tensor({1, {2}}).returns_nothing();
    record.writer().put<uint64_t>(0);
    record.writer().put<uint64_t>(0);
    host.call(record);
  });
  expect_end("length", [](Host& host) {
    Writer out;
    out.put<uint32_t>(1000);
    out.put<uint32_t>(0);
    host.append(RecordKind::storages, 0, out);
  });
}

TEST(numbers_without_bounds_end_the_session) {
  expect_end("not defined", [](Host& host) { host.call(CallRecord(77, 0, 0)); });
  expect_end("out of range", [](Host& host) {
    Writer out;
    out.put<uint32_t>(UINT32_MAX);
    out.put_string("aten::neg");
    out.put_string("");
    host.append(RecordKind::define, 0, out);
  });
  expect_end("out of range", [](Host& host) { host.allocate(UINT32_MAX, 8); });
  expect_end("impossible size", [](Host& host) { host.allocate(2, UINT64_MAX); });
  expect_end("out of range",
             [](Host& host) { host.generator(UINT32_MAX, GeneratorAction::seed, 1); });
}

TEST(nested_lists_do_not_exhaust_the_stack) {
  expect_end("list without bounds", [](Host& host) {
    CallRecord record(1, 1, 1);
    for (int i = 0; i < 100'000; ++i) {
      record.writer().put(Tag::list);
      record.writer().put<uint32_t>(1);
    }
    host.call(record);
  });
}

TEST(values_that_an_enumeration_does_not_have_are_errors) {
  Host host;
  host.start();
  const Tensor tensor = host.upload({1, 2}, {2});
  const uint32_t clone = host.define("aten::clone");
  for (const int64_t format : {int64_t{-1}, int64_t{4}, int64_t{1} << 40}) {
    const Tensor result{host.next_id(), {2}};
    host.call(CallRecord(clone, 2, 1).tensor(tensor).integer(format).returns(result));
    EXPECT(!host.synchronize().ok());
  }
  const Tensor result{host.next_id(), {2}};
  host.call(CallRecord(clone, 2, 1).tensor(tensor).integer(0).returns(result));
  EXPECT_EQ(host.values(result), (std::vector<float>{1, 2}));
}

TEST(requests_that_are_none_end_the_session) {
  expect_end("request",
             [](Host& host) { host.append(RecordKind::read, 0, read_payload(1, 0, 8)); });
  expect_end("request", [](Host& host) {
    Writer out = read_payload(1, 0, 8);
    out.put<uint64_t>(0);
    host.append(RecordKind::write, kRequest, out);
  });
}

TEST(an_answer_taken_before_it_was_given_ends_the_session) {
  expect_end("taken", [](Host& host) {
    const Tensor large{host.next_id(), {4 << 20}};
    host.allocate(large.id, large.bytes());
    host.wait_consumed();
    host.begin_request(RecordKind::read, read_payload(large.id, 0, large.bytes()));
    host.client().answer_taken.store(uint64_t{1} << 40);
    host.session().orders().while_parked([] {});
  });
}
