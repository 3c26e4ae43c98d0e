// What sessions that wait for their turns give up: see Note [Ahead] in worker/replicas/ahead.h.
#include "worker/replicas/ahead.h"

#include <optional>

#include "tests/worker/replicas/company.h"

using namespace sing;
using namespace sing::test;

namespace {

using Found = Ahead::Found;

constexpr int64_t kCount = Job::kCount;
constexpr int64_t kHalf = kCount / 2;
constexpr uint64_t kBytes = kCount * sizeof(float);
constexpr uint64_t kIndexBytes = 3 * sizeof(int64_t);

Geometry part(int64_t begin, int64_t count, Dimensions strides = {1}) {
  Geometry geometry;
  geometry.offset = begin;
  geometry.sizes = {count};
  geometry.strides = std::move(strides);
  return geometry;
}

// Records that are looked at for a storage of 100 floats with the number 7.
class Records {
 public:
  Records() {
    operators_.define(kAdd, "aten::add", "out");
    operators_.define(kZero, "aten::zero_", "");
    operators_.define(kScale, "aten::mul_", "Tensor");
    operators_.define(kCat, "aten::cat", "out");
  }
  Found look(RecordKind kind, const Writer& payload, uint8_t flags = 0) {
    const RecordHeader header{0, static_cast<uint8_t>(kind), flags, 0};
    return ahead_.look(header, payload.view());
  }
  Found call(const CallRecord& call, uint8_t flags = 0) {
    return look(RecordKind::call, call.payload(), flags);
  }
  // aten::add with an output.
  Found add(uint32_t from, uint32_t to, const Geometry& into, uint8_t flags = 0) {
    return call(CallRecord(kAdd, 4, 1)
                    .tensor(from, part(0, 10))
                    .tensor(8, part(0, 10))
                    .integer(1)
                    .tensor(to, into)
                    .returns_nothing(),
                flags);
  }
  static Writer storages(uint32_t id, StorageAction action) {
    Writer out;
    out.put<uint32_t>(1);
    out.put<uint32_t>(0);
    out.put(StorageEntry{id, static_cast<uint32_t>(action), 400});
    return out;
  }

  static constexpr uint32_t kAdd = 0, kZero = 1, kScale = 2, kCat = 3;

 private:
  Operators operators_{/*software=*/true, nullptr};
  Ahead ahead_{operators_, 7, 400};
};

}  // namespace

TEST(ahead_a_storage_is_overwritten_part_by_part) {
  Records records;
  EXPECT(records.add(8, 9, part(0, 100)) == Found::nothing);
  EXPECT(records.add(8, 7, part(50, 50)) == Found::nothing);
  EXPECT(records.look(RecordKind::write, read_payload(7, 0, 40)) == Found::nothing);
  EXPECT(records.look(RecordKind::synchronize, {}, kRequest) == Found::nothing);
  EXPECT(records.call(CallRecord(Records::kZero, 1, 1).tensor(7, part(10, 39)).returns_nothing()) ==
         Found::nothing);
  EXPECT(records.add(8, 7, part(49, 1)) == Found::overwritten);
}

TEST(ahead_a_storage_that_is_freed_is_overwritten) {
  for (const auto action : {StorageAction::allocate, StorageAction::free}) {
    Records records;
    const auto look = [&](uint32_t id) {
      return records.look(RecordKind::storages, Records::storages(id, action));
    };
    EXPECT(look(8) == Found::nothing);
    EXPECT(look(7) == Found::overwritten);
  }
}

TEST(ahead_a_new_operator_is_none_of_the_known_ones) {
  Records records;
  EXPECT(records.look(RecordKind::define, defined(50, "aten::sub", "Tensor")) == Found::nothing);
  EXPECT(records.add(8, 7, part(0, 100)) == Found::overwritten);
}

TEST(ahead_what_may_use_a_byte_uses_the_storage) {
  const auto used = [](auto look) {
    Records records;
    EXPECT(look(records) == Found::used);
  };
  used([](Records& r) { return r.add(7, 9, part(0, 10)); });
  used([](Records& r) { return r.add(7, 7, part(0, 10)); });
  used([](Records& r) { return r.add(8, 7, part(0, 10, {2})); });  // with gaps
  used([](Records& r) { return r.add(8, 7, part(0, 0)); });        // may get another size
  used([](Records& r) { return r.add(8, 7, part(0, 100), kRequest); });
  used([](Records& r) {
    return r.call(
        CallRecord(Records::kScale, 2, 1).tensor(7, part(0, 100)).number(2).returns_nothing());
  });
  used([](Records& r) {
    return r.call(CallRecord(Records::kCat, 3, 1)
                      .tensors({Tensor{8, {10}}, Tensor{7, {10}}})
                      .integer(0)
                      .tensor(9, part(0, 20))
                      .returns_nothing());
  });
  used([](Records& r) { return r.look(RecordKind::read, read_payload(7, 0, 4), kRequest); });
  used([](Records& r) { return r.look(RecordKind::resize, read_payload(7, 400, 0)); });
  used([](Records& r) {
    return r.look(RecordKind::define, defined(Records::kAdd, "aten::sub", "Tensor"));
  });
  used([](Records& r) { return r.call(CallRecord(99, 0, 0)); });  // not defined
  used([](Records& r) { return r.call(CallRecord(Records::kAdd, 2, 1)); });
  used([](Records& r) {  // ends in the middle
    return r.call(CallRecord(Records::kAdd, 4, 1).tensor(8, part(0, 10)));
  });
}

namespace {

// Ranks that own one version, of ones, with what each does to it in its next turn.
struct Turns {
  explicit Turns(size_t ranks) : job(ranks), weights(job.constant(1)), sources(job.constant(4)) {
    for (auto& rank : job.ranks) {
      add.push_back(rank->host.define("aten::add", "out"));
      take = rank->host.define("aten::take", "out");
      indices = rank->host.upload_indices({0, 1, 1 << 30}, {3});
    }
    for (auto& rank : job.ranks) rank->host.wait_consumed();
    before = job[0].host.session().state().storages.slots()[weights[0].id].storage.data();
    present.emplace(job.seat());
    present->await_begun();
  }
  // Overwrites elements with 4 (1 + alpha).
  void overwrite(size_t rank, int64_t begin, int64_t count, int64_t alpha) {
    job[rank].host.call(CallRecord(add[rank], 4, 1)
                            .tensor(sources[rank].id, part(0, count))
                            .tensor(sources[rank].id, part(0, count))
                            .integer(alpha)
                            .tensor(weights[rank].id, part(begin, count))
                            .returns_nothing());
  }
  // Returns when so many turns wait.
  void await_waiting(size_t count) {
    while (job.seat().waiting() < count) sched_yield();
  }
  void carry_out() {
    present.reset();
    for (auto& rank : job.ranks) rank->host.wait_consumed();
  }
  std::vector<float> values(size_t rank) { return job[rank].host.values(weights[rank]); }
  uint64_t given_up() { return job.replicas.figures().given_up; }

  Job job;
  std::vector<Tensor> weights, sources;
  std::vector<uint32_t> add;
  uint32_t take;
  Tensor indices;  // the last one is out of range
  const void* before;
  std::optional<Occupied> present;
};

std::vector<float> halves(float first, float second) {
  std::vector<float> values(kCount, second);
  std::fill_n(values.begin(), kHalf, first);
  return values;
}

}  // namespace

TEST(what_all_owners_overwrite_is_overwritten_in_its_memory) {
  Turns turns(3);
  for (size_t rank = 0; rank < 3; ++rank) {
    turns.overwrite(rank, kHalf, kHalf, static_cast<int64_t>(rank));
    turns.await_waiting(rank + 1);
    turns.overwrite(rank, 0, kHalf, static_cast<int64_t>(rank) + 1);
  }
  turns.carry_out();
  EXPECT_EQ(turns.given_up(), uint64_t{2});
  const auto& slots = turns.job[0].host.session().state().storages.slots();
  EXPECT(slots[turns.weights[0].id].storage.data() == turns.before);
  for (size_t rank = 0; rank < 3; ++rank) {
    const auto i = static_cast<float>(rank);
    EXPECT_EQ(turns.values(rank), halves(8 + 4 * i, 4 + 4 * i));
    EXPECT_EQ(turns.job[rank].host.worker().memory_resident.load(), 2 * kBytes + kIndexBytes);
  }
}

TEST(what_an_owner_uses_is_kept_for_it) {
  Turns turns(3);
  turns.overwrite(0, 0, kHalf, 0);
  turns.await_waiting(1);
  const Tensor product = turns.job[1].multiply(turns.weights[1], turns.weights[1]);
  turns.overwrite(1, 0, kCount, 2);
  turns.await_waiting(2);
  turns.overwrite(2, 0, kHalf, 3);  // not all of it
  turns.await_waiting(3);
  turns.carry_out();
  EXPECT_EQ(turns.given_up(), uint64_t{0});
  EXPECT_EQ(turns.values(0), halves(4, 1));
  EXPECT_EQ(turns.job[1].value(product), 1.0f);
  EXPECT_EQ(turns.values(1), halves(12, 12));
  EXPECT_EQ(turns.values(2), halves(16, 1));
}

TEST(what_was_given_up_can_be_used_after_a_failure) {
  Turns turns(2);
  turns.overwrite(0, 0, kHalf, 0);
  turns.await_waiting(1);
  Host& host = turns.job[1].host;
  turns.overwrite(1, 0, kHalf - 3, 1);
  turns.await_waiting(2);
  host.call(CallRecord(turns.take, 3, 1)
                .tensor(turns.sources[1])
                .tensor(turns.indices)
                .tensor(turns.weights[1].id, part(kHalf - 3, 3))
                .returns_nothing());
  turns.overwrite(1, kHalf, kHalf, 1);
  // A program that asks for less has its turn in that of the first one.
  for (int i = 0; i < 4; ++i) turns.job[1].scale({turns.sources[1]}, 1);
  turns.present.reset();
  EXPECT(!host.synchronize().ok());
  EXPECT_EQ(turns.given_up(), uint64_t{1});
  turns.overwrite(1, 0, kHalf, 2);
  turns.overwrite(1, kHalf, kHalf, 2);
  EXPECT_EQ(turns.values(1), halves(12, 12));
  EXPECT_EQ(turns.values(0), halves(4, 1));
}

TEST(what_was_given_up_is_overwritten_after_a_snapshot) {
  Turns turns(2);
  turns.overwrite(0, 0, kCount, 0);
  turns.await_waiting(1);
  Occupied between(turns.job.seat());
  turns.await_waiting(2);
  for (const int64_t begin : {int64_t{0}, kHalf}) turns.overwrite(1, begin, kHalf, 1);
  turns.await_waiting(3);
  turns.present.reset();
  between.await_begun();
  EXPECT_EQ(turns.given_up(), uint64_t{1});
  Host& host = turns.job[1].host;
  EXPECT_EQ(host.worker().memory_resident.load(), kBytes + kIndexBytes);
  uint64_t position = 0;
  const File file(host.snapshot(&position));
  host.commit(position);
  between.release();
  host.stop();
  host.start(file.fd());
  host.wait_consumed();
  EXPECT_EQ(turns.values(0), halves(4, 4));
  EXPECT_EQ(turns.values(1), halves(8, 8));
}
