// Equal bytes are held once, and calls that make them are executed once.
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <torch/library.h>

#include "oplog/settings.h"
#include "tests/worker/replicas/company.h"

using namespace sing;
using namespace sing::test;

namespace {

constexpr uint64_t kBytes = Rank::kCount * sizeof(float);

// An operator that breaks the rule: its result is another one each time.
at::Tensor undetermined(const at::Tensor& tensor) {
  static int calls = 0;
  return tensor.add(++calls);
}

TORCH_LIBRARY_FRAGMENT(aten, library) {
  library.def("sing_test_undetermined(Tensor self) -> Tensor");
  library.impl("sing_test_undetermined", c10::DispatchKey::CPU, TORCH_FN(undetermined));
}

void call_undetermined(Rank& rank) {
  const uint32_t op = rank.host.define("aten::sing_test_undetermined");
  const Tensor operand = rank.constant(1), result{rank.host.next_id(), {Rank::kCount}};
  rank.host.call(CallRecord(op, 1, 1).tensor(operand).returns(result));
}

// The run ends at the position of the record.
void expect_stopped(Rank& rank, const std::string& operation) {
  const std::string text = rank.host.corruption();
  const uint64_t position = rank.host.worker().consumed.load();
  EXPECT_EQ(text, "bytes that should be equal are not: " + operation + ", at position " +
                      std::to_string(position));
}

}  // namespace

TEST(splicing_holds_equal_uploads_once) {
  Company seat(3);
  std::vector<Tensor> tensors;
  seat.each([&](Rank& rank) { tensors.push_back(rank.constant(2)); });
  EXPECT_EQ(seat.figures().uploads_shared, uint64_t{2});
  EXPECT_EQ(seat.figures().bytes_shared, 2 * kBytes);
  const Tensor other = seat[1].constant(3);
  EXPECT_EQ(seat[1].value(other), 3.0f);
  EXPECT_EQ(seat.figures().bytes_shared, 2 * kBytes);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(seat[i].value(tensors[i]), 2.0f);
}

TEST(splicing_executes_calls_on_equal_operands_once) {
  Company seat(4);
  std::vector<std::vector<Tensor>> all;
  seat.each([&](Rank& rank) {
    // The numbers of storages differ between ranks.
    for (size_t i = 0; i < all.size(); ++i) rank.host.next_id();
    std::vector<Tensor> weights{rank.constant(1), rank.constant(2, 70'000)};
    const std::vector<Tensor> steps{rank.constant(10), rank.constant(20, 70'000)};
    rank.add(weights, steps, 0.5);
    const Tensor result = rank.multiply(weights[0], weights[0]);
    weights.push_back(result);
    all.push_back(weights);
  });
  EXPECT_EQ(seat.figures().executed, uint64_t{2});
  EXPECT_EQ(seat.figures().squashed, uint64_t{6});
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(seat[i].value(all[i][0]), 6.0f);
    EXPECT_EQ(seat[i].value(all[i][1]), 12.0f);
    EXPECT_EQ(seat[i].value(all[i][2]), 36.0f);
  }
}

TEST(splicing_executes_what_differs) {
  Company seat(3);
  const float values[] = {3, 4, 3};
  const double factors[] = {2, 2, 5};
  for (size_t i = 0; i < 3; ++i) {
    const Tensor weight = seat[i].constant(values[i]);
    seat[i].scale({weight}, factors[i]);
    EXPECT_EQ(seat[i].value(weight), static_cast<float>(values[i] * factors[i]));
  }
  EXPECT_EQ(seat.figures().squashed, uint64_t{0});
  EXPECT_EQ(seat.figures().executed, uint64_t{3});
}

TEST(splicing_tells_views_and_shared_storages_apart) {
  Company seat(2);
  // b[1:] += b[:-1] is another call than b[1:] += c[:-1].
  std::vector<std::vector<float>> results;
  seat.each([&](Rank& rank) {
    const uint32_t add = rank.host.define("aten::add_", "Tensor");
    const Tensor to = rank.host.upload({1, 2, 3, 4}, {4});
    const Tensor from = results.empty() ? to : rank.host.upload({1, 2, 3, 4}, {4});
    Geometry target = contiguous(to);
    target.sizes = {2};
    Geometry source = target;
    target.offset = 2;
    rank.host.call(CallRecord(add, 3, 1)
                       .tensor(to.id, target)
                       .tensor(from.id, source)
                       .integer(1)
                       .returns_nothing());
    results.push_back(rank.host.values(to));
  });
  EXPECT_EQ(seat.figures().squashed, uint64_t{0});
  EXPECT_EQ(results[0], (std::vector<float>{1, 2, 4, 6}));
  EXPECT_EQ(results[1], results[0]);
}

TEST(splicing_depends_on_settings) {
  Company seat(2);
  seat.each([&](Rank& rank) {
    Settings settings{};
    read_settings(settings);
    settings[3] = &rank == seat.ranks[1].get();  // the precision of products
    Writer record;
    put_settings(record, settings);
    rank.host.append(RecordKind::settings, 0, record);
    const Tensor tensor = rank.constant(1);
    rank.scale({tensor}, 2);
  });
  EXPECT_EQ(seat.figures().squashed, uint64_t{0});
  EXPECT_EQ(seat.figures().executed, uint64_t{2});
  Settings initial{};
  read_settings(initial);
  initial[3] = 0;
  apply_settings(initial);
}

TEST(splicing_knows_no_random_numbers) {
  Company seat(2);
  seat.each([&](Rank& rank) {
    rank.host.generator(1, GeneratorAction::seed, 5);
    const Tensor tensor = rank.constant(0);
    rank.host.call(CallRecord(rank.normal, 4, 1)
                       .tensor(tensor)
                       .real(0)
                       .real(1)
                       .generator(1)
                       .returns_nothing());
    rank.scale({tensor}, 2);
  });
  EXPECT_EQ(seat.figures().squashed, uint64_t{0});
  EXPECT_EQ(seat.figures().executed, uint64_t{0});
  EXPECT_EQ(seat.figures().bytes_shared, uint64_t{0});
}

TEST(splicing_finds_what_was_read_and_uploaded) {
  Company seat(3);
  std::vector<Tensor> weights;
  seat.each([&](Rank& rank) {
    if (weights.empty()) {
      // Random, so unknown, until it is read for the others.
      weights.push_back(rank.constant(0));
      rank.host.generator(1, GeneratorAction::seed, 5);
      rank.host.call(CallRecord(rank.normal, 4, 1)
                         .tensor(weights[0])
                         .real(0)
                         .real(1)
                         .generator(1)
                         .returns_nothing());
    } else {
      weights.push_back(rank.host.upload(seat[0].host.values(weights[0]), {Rank::kCount}));
    }
  });
  EXPECT_EQ(seat.figures().bytes_shared, 2 * kBytes);
  // Computed, so known by another id; it stays equal for those that do not read it.
  size_t at = 0;
  seat.each([&](Rank& rank) { rank.scale({weights[at++]}, 2); });
  EXPECT_EQ(seat.figures().squashed, uint64_t{2});
  const auto values = seat[1].host.values(weights[1]);
  const Tensor again = seat[2].host.upload(values, {Rank::kCount});
  seat[2].host.wait_consumed();
  at = 0;
  seat.each([&](Rank& rank) { rank.scale({weights[at++]}, 2); });
  EXPECT_EQ(seat.figures().squashed, uint64_t{4});
  EXPECT_EQ(seat[2].host.values(again), values);
}

TEST(splicing_knows_uploads_in_pieces) {
  Company seat(2);
  std::vector<Tensor> tensors;
  const std::vector<float> values(Rank::kCount, 7);
  seat.each([&](Rank& rank) {
    const Tensor tensor = rank.host.allocate({Rank::kCount});
    // In other pieces.
    const uint64_t piece = tensors.empty() ? 4096 : 12'000;
    for (uint64_t at = 0; at < kBytes; at += piece) {
      Writer record = read_payload(tensor.id, at, std::min(piece, kBytes - at));
      record.put_bytes(reinterpret_cast<const std::byte*>(values.data()) + at,
                       std::min(piece, kBytes - at));
      rank.host.append(RecordKind::write, 0, record);
    }
    tensors.push_back(tensor);
  });
  EXPECT_EQ(seat.figures().bytes_shared, kBytes);
  for (size_t i = 0; i < 2; ++i) EXPECT_EQ(seat[i].value(tensors[i]), 7.0f);
}

TEST(splicing_knows_results_of_requests) {
  Company seat(2);
  std::vector<Tensor> results;
  seat.each([&](Rank& rank) {
    const Tensor a = rank.constant(3), b = rank.constant(5);
    if (results.empty()) {
      const uint32_t id = rank.host.next_id();
      CallRecord call(rank.mul, 2, 1);
      EXPECT(rank.host.request_recorded(call.tensor(a).tensor(b).returns_number(id)).ok());
      results.push_back({id, {Rank::kCount}});
    } else {
      results.push_back(rank.multiply(a, b));
    }
  });
  EXPECT_EQ(seat.figures().squashed, uint64_t{1});
  for (size_t i = 0; i < 2; ++i) EXPECT_EQ(seat[i].value(results[i]), 15.0f);
}

TEST(splicing_answers_requests_that_others_have_made) {
  Company seat(3);
  const uint32_t sqrt = seat[0].host.define("aten::_foreach_sqrt");
  for (size_t i = 1; i < 3; ++i) seat[i].host.define("aten::_foreach_sqrt");
  std::vector<Tensor> operands, results;
  std::vector<Bytes> answers;
  seat.each([&](Rank& rank) {
    const Tensor a = rank.constant(4), b = rank.constant(9);
    operands.push_back(a);
    const uint32_t id = rank.host.next_id();
    const uint32_t other = rank.host.next_id();
    CallRecord call(sqrt, 1, 1);
    call.tensors({a, b});
    call.writer().put(Tag::list);
    call.writer().put<uint32_t>(3);  // one more than needed
    for (const uint32_t each : {id, other, rank.host.next_id()}) call.writer().put<uint32_t>(each);
    const Answer answer = rank.host.request_recorded(call);
    EXPECT(answer.ok());
    answers.push_back(answer.bytes);
    results.push_back({id, {Rank::kCount}});
    // The first one overwrites its results, and later the operand, before the next one comes.
    if (results.size() == 1) rank.scale({results[0]}, 10);
    rank.host.wait_consumed();
    if (results.size() == 2) rank.scale({a}, 0);
    EXPECT_EQ(rank.value({other, {Rank::kCount}}), 3.0f);
  });
  EXPECT(answers[1] == answers[0]);
  EXPECT(answers[2] == answers[0]);
  EXPECT_EQ(seat.figures().postponed, uint64_t{2});
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(seat[i].value(results[i]), i == 0 ? 20.0f : 2.0f);
}

TEST(splicing_answers_requests_that_change_operands) {
  Company seat(2);
  std::vector<Tensor> sums;
  seat.each([&](Rank& rank) {
    const uint32_t add = rank.host.define("aten::add_", "Tensor");
    const Tensor a = rank.constant(3), b = rank.constant(5);
    CallRecord call(add, 3, 1);
    call.tensor(a).tensor(b).integer(1).returns_nothing();
    const Answer answer = rank.host.request_call(call);
    EXPECT(answer.ok());
    sums.push_back(a);
    if (sums.size() == 1) rank.scale({a}, 10);
    rank.host.wait_consumed();
  });
  EXPECT_EQ(seat.figures().postponed, uint64_t{1});
  EXPECT_EQ(seat[0].value(sums[0]), 80.0f);
  EXPECT_EQ(seat[1].value(sums[1]), 8.0f);
}

TEST(splicing_reports_failures_of_each_rank) {
  Company seat(2);
  seat.each([&](Rank& rank) {
    const uint32_t gather = rank.host.define("aten::gather");
    const Tensor from = rank.constant(3);
    const Tensor index = rank.host.upload_indices({int64_t{1} << 30}, {1});
    const Tensor result{rank.host.next_id(), {1}};
    rank.host.call(CallRecord(gather, 4, 1)
                       .tensor(from)
                       .integer(0)
                       .tensor(index)
                       .boolean(false)
                       .returns(result));
    EXPECT_EQ(rank.host.synchronize().operation(), "aten::gather");
    EXPECT_EQ(rank.host.read(result).kind(), ErrorKind::lost_operand);
  });
  EXPECT_EQ(seat.figures().squashed, uint64_t{0});
}

TEST(splicing_counts_memory_as_without_it) {
  const auto resident = [](Rank& rank) {
    const Tensor weight = rank.constant(3);
    const Tensor zeros = rank.host.allocate({Rank::kCount});
    rank.multiply(weight, zeros);
    rank.scale({weight}, 2);
    rank.host.wait_consumed();
    return rank.host.worker().memory_resident.load();
  };
  Rank alone(nullptr);
  const uint64_t expected = resident(alone);
  Company seat(2);
  EXPECT_EQ(resident(seat[0]), expected);
  EXPECT_EQ(resident(seat[1]), expected);
  EXPECT_EQ(seat.figures().squashed, uint64_t{2});
}

TEST(splicing_checks_uploads) {
  // A hash that takes all bytes of one size for the same.
  Company seat(2, /*checks=*/true, 1 << 20,
               [](std::span<const std::byte> bytes) { return ContentId{2, bytes.size()}; });
  seat[0].constant(1);
  seat[0].host.wait_consumed();
  seat[1].constant(2);
  expect_stopped(seat[1], "a copy to the device");
}

TEST(splicing_checks_calls_that_it_does_not_execute) {
  Company seat(2);
  call_undetermined(seat[0]);
  seat[0].host.wait_consumed();
  call_undetermined(seat[1]);
  expect_stopped(seat[1], "aten::sing_test_undetermined");
}

namespace {

// Writes bytes with a name, in two pieces or as a whole.
void write_named(Rank& rank, const Tensor& tensor, float value, uint64_t name, bool whole = true) {
  const std::vector<float> values(Rank::kCount, value);
  const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
  for (uint64_t at = 0; at < kBytes;) {
    const uint64_t count = whole ? kBytes : std::min<uint64_t>(12'000, kBytes - at);
    Writer record = read_payload(tensor.id, at, count);
    record.put(ContentName{name, name});
    record.put_bytes(bytes + at, count);
    rank.host.append(RecordKind::write, kNamed, record);
    at += count;
  }
}

Tensor received(Rank& rank, float value, uint64_t name, bool whole = true) {
  const Tensor tensor = rank.host.allocate({Rank::kCount});
  write_named(rank, tensor, value, name, whole);
  return tensor;
}

void read_named(Rank& rank, const Tensor& tensor, uint64_t name) {
  Writer record = read_payload(tensor.id, 0, kBytes);
  record.put(ContentName{name, name});
  EXPECT(rank.host.request(RecordKind::read, record, kNamed).ok());
}

}  // namespace

TEST(splicing_knows_equal_bytes_by_their_names) {
  for (const bool whole : {true, false}) {
    Company seat(3);
    std::vector<Tensor> tensors;
    seat.each([&](Rank& rank) {
      tensors.push_back(received(rank, 4, 7, whole));
      rank.scale({tensors.back()}, 2);
    });
    EXPECT_EQ(seat.figures().squashed, uint64_t{2});
    EXPECT_EQ(seat.figures().uploads_shared, uint64_t{0});  // the first version has changed
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(seat[i].value(tensors[i]), 8.0f);
    seat.each([&](Rank& rank) { write_named(rank, tensors[0], 5, 8, whole); });
    EXPECT_EQ(seat.figures().uploads_shared, uint64_t{2});
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(seat[i].value(tensors[i]), 5.0f);
  }
}

TEST(splicing_finds_a_name_that_was_read) {
  Company seat(3);
  const Tensor root = seat[0].constant(3);
  read_named(seat[0], root, 9);
  const Tensor other = received(seat[1], 3, 9);
  const Tensor pieces = received(seat[2], 3, 9, /*whole=*/false);
  EXPECT_EQ(seat[1].value(other), 3.0f);
  EXPECT_EQ(seat[2].value(pieces), 3.0f);
  EXPECT_EQ(seat.figures().versions, uint64_t{1});
  for (uint64_t name = 10; name < 40; ++name) read_named(seat[0], root, name);
  EXPECT_EQ(seat.figures().versions, uint64_t{1});
}

TEST(splicing_tells_names_apart) {
  Company seat(2);
  const Tensor one = received(seat[0], 1, 5), two = received(seat[1], 2, 6);
  EXPECT_EQ(seat[0].value(one), 1.0f);
  EXPECT_EQ(seat[1].value(two), 2.0f);
  // A name counts only if all pieces have it.
  const Tensor mixed = received(seat[0], 1, 7, /*whole=*/false);
  const std::vector<float> values(Rank::kCount, 9);
  Writer record = read_payload(mixed.id, 12'000, kBytes - 12'000);
  record.put_bytes(values.data(), kBytes - 12'000);
  seat[0].host.append(RecordKind::write, 0, record);
  const Tensor other = received(seat[1], 1, 7, /*whole=*/false);
  EXPECT_EQ(seat[1].value(other), 1.0f);
  EXPECT_EQ(seat[0].host.values(mixed)[2999], 1.0f);
  EXPECT_EQ(seat[0].host.values(mixed)[3000], 9.0f);
}

TEST(splicing_checks_names) {
  for (const bool whole : {true, false}) {
    Company seat(2);
    received(seat[0], 1, 5, whole);
    seat[0].host.wait_consumed();
    received(seat[1], 2, 5, whole);
    expect_stopped(seat[1], "a copy to the device");
  }
}

TEST(splicing_derives_the_same_of_what_was_sent_and_what_was_received) {
  for (const bool kept : {true, false}) {
    Company seat(3);
    const Tensor root = seat[0].constant(3);
    const Tensor sent = seat[0].multiply(root, root);
    read_named(seat[0], sent, 9);
    std::vector<Tensor> results{seat[0].multiply(sent, sent)};
    if (!kept) seat[0].host.free(sent.id);
    seat[0].host.wait_consumed();
    for (size_t i = 1; i < 3; ++i) {
      const Tensor tensor = received(seat[i], 9, 9, /*whole=*/i == 1);
      results.push_back(seat[i].multiply(tensor, tensor));
      seat[i].host.wait_consumed();
    }
    EXPECT_EQ(seat.figures().squashed, uint64_t{2});
    EXPECT_EQ(seat.figures().uploads_shared, kept ? uint64_t{2} : uint64_t{1});
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(seat[i].value(results[i]), 81.0f);
  }
}
