// Versions that their owners overwrite part by part: see Note [Rewrites].
#include <c10/core/CPUAllocator.h>

#include "tests/worker/replicas/company.h"

using namespace sing;
using namespace sing::test;

namespace {

constexpr int64_t kCount = Rank::kCount;

// Ranks that own one version, of ones, and an operator for its parts.
struct Bucket {
  explicit Bucket(size_t ranks) : seat(ranks) {
    seat.each([&](Rank& rank) {
      add.push_back(rank.host.define("aten::add", "out"));
      tensors.push_back(rank.constant(1));
      sources.push_back(rank.constant(static_cast<float>(sources.size() + 1)));
    });
  }
  // Overwrites the elements from `begin` to `end` with three times the rank's number.
  void overwrite(size_t rank, int64_t begin, int64_t end) {
    Geometry to = contiguous(tensors[rank]), from = to;
    to.offset = begin;
    to.sizes = from.sizes = {end - begin};
    seat[rank].host.call(CallRecord(add[rank], 4, 1)
                             .tensor(sources[rank].id, from)
                             .tensor(sources[rank].id, from)
                             .integer(2)
                             .tensor(tensors[rank].id, to)
                             .returns_nothing());
    seat[rank].host.wait_consumed();
  }
  std::vector<float> values(size_t rank) { return seat[rank].host.values(tensors[rank]); }

  Company seat;
  std::vector<uint32_t> add;
  std::vector<Tensor> tensors, sources;
};

std::vector<float> expected(float first, int64_t count, float then) {
  std::vector<float> values(kCount, then);
  std::fill_n(values.begin(), count, first);
  return values;
}

}  // namespace

TEST(rewrites_note_what_is_left) {
  Replicas replicas;
  const uint32_t session = replicas.join();
  const auto made = [](std::byte value) {
    c10::Storage storage = fresh_storage(c10::GetCPUAllocator(), 100);
    std::memset(storage.mutable_data(), static_cast<int>(value), 100);
    return storage;
  };
  for (int order = 0; order < 6; ++order) {
    std::vector<std::pair<uint64_t, uint64_t>> parts{{10, 20}, {30, 15}, {60, 40}};
    for (int i = 0; i < order; ++i) std::next_permutation(parts.begin(), parts.end());
    ContentId id = ContentId::zeros(100);
    Rewrite rewrite(replicas.enter(id, session, made(std::byte{1}), false), made(std::byte{2}));
    for (const auto& [offset, count] : parts) rewrite.note_overwritten(offset, count);
    EXPECT(!rewrite.complete());
    rewrite.finish();
    const auto* const found = static_cast<const std::byte*>(rewrite.storage().data());
    for (uint64_t i = 0; i < 100; ++i) {
      const bool written = (i >= 10 && i < 45) || i >= 60;
      EXPECT_EQ(found[i], std::byte{written ? uint8_t{2} : uint8_t{1}});
    }
    Rewrite whole(replicas.enter(id, session, made(std::byte{1}), false), made(std::byte{2}));
    for (const auto& [offset, count] : parts) whole.note_overwritten(offset, count);
    whole.note_overwritten(0, 11);
    EXPECT(!whole.complete());
    whole.note_overwritten(44, 17);
    EXPECT(whole.complete());
  }
  replicas.leave(session);
}

TEST(rewrites_end_as_if_the_version_was_copied) {
  Bucket bucket(3);
  for (size_t rank = 0; rank < 2; ++rank) {
    bucket.overwrite(rank, 0, 1000);
    bucket.overwrite(rank, 3000, kCount);
    bucket.overwrite(rank, 1000, 3000);
    EXPECT_EQ(bucket.values(2), expected(1, kCount, 1));
  }
  EXPECT_EQ(bucket.values(0), expected(3, kCount, 3));
  EXPECT_EQ(bucket.values(1), expected(6, kCount, 6));
  EXPECT_EQ(bucket.values(2), expected(1, kCount, 1));
}

TEST(rewrites_are_finished_when_the_storage_is_used) {
  Bucket bucket(2);
  bucket.overwrite(0, 0, 1000);
  EXPECT_EQ(bucket.values(0), expected(3, 1000, 1));
  bucket.overwrite(1, 0, 1000);  // alone
  EXPECT_EQ(bucket.values(1), expected(6, 1000, 1));
}

TEST(rewrites_keep_the_bytes_of_a_part_whose_operator_failed) {
  Bucket bucket(2);
  bucket.overwrite(0, 0, 1000);
  Host& host = bucket.seat[0].host;
  const uint32_t take = host.define("aten::take", "out");
  const Tensor indices = host.upload_indices({0, 1, 1 << 20}, {3});
  Geometry to = contiguous(bucket.tensors[0]);
  to.offset = 1000;
  to.sizes = {3};
  host.call(CallRecord(take, 3, 1)
                .tensor(bucket.sources[0])
                .tensor(indices)
                .tensor(bucket.tensors[0].id, to)
                .returns_nothing());
  EXPECT(!host.synchronize().ok());
  EXPECT_EQ(bucket.values(0), expected(3, 1000, 1));
}

TEST(rewrites_keep_their_size_if_an_operator_resizes_its_output) {
  Bucket bucket(2);
  bucket.overwrite(0, 0, 1000);
  Host& host = bucket.seat[0].host;
  Geometry to = contiguous(bucket.tensors[0]);
  to.offset = 1000;
  to.sizes = {3};
  host.call(CallRecord(bucket.add[0], 4, 1)
                .tensor(bucket.sources[0])
                .tensor(bucket.sources[0])
                .integer(2)
                .tensor(bucket.tensors[0].id, to)
                .returns_nothing());
  const Answer answer = host.synchronize();
  EXPECT(!answer.ok());
  EXPECT_EQ(bucket.values(0)[999], 3.0f);
  EXPECT_EQ(bucket.values(0)[1000], 1.0f);
  EXPECT_EQ(host.worker().memory_resident.load(), 2 * kCount * sizeof(float));
}

TEST(rewrites_are_in_snapshots) {
  Bucket bucket(2);
  bucket.overwrite(0, 0, 1000);
  Rank& rank = bucket.seat[0];
  uint64_t position = 0;
  const File file(rank.host.snapshot(&position));
  bucket.overwrite(0, 1000, 2000);
  rank.host.commit(position);
  rank.host.stop();
  rank.host.start(file.fd());
  EXPECT_EQ(bucket.values(0), expected(3, 2000, 1));
  EXPECT_EQ(bucket.values(1), expected(1, kCount, 1));
}

TEST(rewrites_by_uploads_in_pieces) {
  Bucket bucket(2);
  const std::vector<float> values(kCount, 8);
  const auto upload = [&](uint64_t offset, uint64_t count) {
    Writer record = read_payload(bucket.tensors[0].id, offset, count);
    record.put_bytes(values.data(), count);
    bucket.seat[0].host.append(RecordKind::write, 0, record);
    bucket.seat[0].host.wait_consumed();
  };
  upload(0, 4000);
  EXPECT_EQ(bucket.values(0), expected(8, 1000, 1));
  upload(4000, kCount * sizeof(float) - 4000);
  EXPECT_EQ(bucket.values(0), expected(8, kCount, 8));
  EXPECT_EQ(bucket.values(1), expected(1, kCount, 1));
}
