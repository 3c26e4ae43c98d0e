// What several sessions upload at the same time, by one name: see Note [Shared uploads].
#include "tests/worker/replicas/company.h"
#include "worker/snapshot/tables.h"

using namespace sing;
using namespace sing::test;

namespace {

constexpr int64_t kCount = 80'000;
constexpr uint64_t kBytes = kCount * sizeof(float);
constexpr int64_t kPieces = 4;
constexpr int64_t kPiece = kCount / kPieces;

struct Uploads {
  explicit Uploads(size_t ranks, bool checks = true) : seat(ranks, checks) {
    seat.each([this](Rank& rank) { tensors.push_back(rank.host.allocate({kCount})); });
  }
  // Writes one piece of what has this name, and waits until it was executed.
  void piece(size_t rank, int64_t number, float value = 4, uint64_t name = 7) {
    const std::vector<float> values(kPiece, value + static_cast<float>(number));
    Writer record = read_payload(tensors[rank].id, static_cast<uint64_t>(number) * kPiece * 4,
                                 kPiece * sizeof(float));
    record.put(ContentName{name, name});
    record.put_bytes(values.data(), kPiece * sizeof(float));
    seat[rank].host.append(RecordKind::write, kNamed, record);
    seat[rank].host.wait_consumed();
  }
  // True if the first pieces are there, and the others as before.
  bool has(size_t rank, int64_t pieces, float before, float value = 4) {
    const auto found = seat[rank].host.values(tensors[rank]);
    for (int64_t i = 0; i < kCount; ++i) {
      const auto number = static_cast<float>(i / kPiece);
      const float expected = i < pieces * kPiece ? value + number : before;
      if (found[static_cast<size_t>(i)] != expected) return false;
    }
    return true;
  }
  // Lets a collective take the tensor.
  void take(size_t rank) {
    Writer record = read_payload(tensors[rank].id, 0, kBytes);
    record.put(ContentName{9, rank});
    EXPECT(seat[rank].host.request(RecordKind::read, record, kNamed | kLast).ok());
  }
  uint64_t unshared(size_t rank) { return seat[rank].host.session().state().storages.unshared(); }

  Company seat;
  std::vector<Tensor> tensors;
};

}  // namespace

TEST(uploads_by_one_name_take_memory_once) {
  Uploads job(3);
  for (int64_t number = 0; number < kPieces; ++number) {
    for (size_t rank = 0; rank < 3; ++rank) {
      // Another one is first each time.
      const size_t who = (rank + static_cast<size_t>(number)) % 3;
      job.piece(who, number);
      if (number < kPieces - 1) EXPECT_EQ(job.unshared(who), uint64_t{0});
    }
  }
  EXPECT_EQ(job.seat.figures().versions, uint64_t{1});
  EXPECT_EQ(job.seat.figures().bytes_shared, 2 * kBytes);
  for (size_t rank = 0; rank < 3; ++rank) EXPECT(job.has(rank, kPieces, 0));
}

TEST(uploads_that_are_used_before_they_are_complete_are_copied) {
  Uploads job(3);
  for (size_t rank = 0; rank < 3; ++rank) job.tensors[rank] = job.seat[rank].constant(1, kCount);
  for (size_t rank = 0; rank < 3; ++rank) job.piece(rank, 0);
  job.piece(0, 1);
  EXPECT(job.has(1, 1, 1));
  job.seat[1].scale({job.tensors[1]}, 2);
  EXPECT(job.has(0, 2, 1));
  for (size_t rank = 0; rank < 3; rank += 2) {
    for (int64_t number = rank == 0 ? 2 : 1; number < kPieces; ++number) job.piece(rank, number);
    EXPECT(job.has(rank, kPieces, 1));
  }
  const auto values = job.seat[1].host.values(job.tensors[1]);
  EXPECT_EQ(values[0], 8.0f);
  EXPECT_EQ(values[kPiece], 2.0f);
}

TEST(uploads_stay_as_they_are_when_the_first_session_changes_them) {
  Uploads job(3);
  for (int64_t number = 0; number < 2; ++number) {
    for (size_t rank = 0; rank < 3; ++rank) job.piece(rank, number);
  }
  job.piece(0, 2);
  job.piece(0, 3);
  job.seat[0].scale({job.tensors[0]}, 0.5);
  job.seat[0].host.wait_consumed();
  for (size_t rank = 1; rank < 3; ++rank) {
    job.piece(rank, 2);
    job.piece(rank, 3);
    EXPECT(job.has(rank, kPieces, 0));
  }
  EXPECT_EQ(job.seat[0].host.values(job.tensors[0])[0], 2.0f);
}

TEST(uploads_that_end_leave_those_of_others) {
  Uploads job(3);
  for (size_t rank = 0; rank < 3; ++rank) job.piece(rank, 0);
  job.seat[0].host.free(job.tensors[0].id);
  job.piece(1, 1, 20, 8);  // another name: its own memory from here on
  job.piece(2, 1);
  job.piece(2, 2);
  job.piece(2, 3);
  EXPECT(job.has(2, kPieces, 0));
  const auto values = job.seat[1].host.values(job.tensors[1]);
  EXPECT_EQ(values[0], 4.0f);
  EXPECT_EQ(values[kPiece], 21.0f);
  EXPECT_EQ(values[2 * kPiece], 0.0f);
}

TEST(uploads_into_what_a_collective_took_are_shared) {
  Uploads job(2);
  for (size_t rank = 0; rank < 2; ++rank) {
    job.tensors[rank] = job.seat[rank].constant(static_cast<float>(rank), kCount);
    job.take(rank);
  }
  for (int64_t number = 0; number < kPieces; ++number) {
    for (size_t rank = 0; rank < 2; ++rank) job.piece(rank, number);
  }
  EXPECT_EQ(job.seat.figures().bytes_shared, kBytes);
  for (size_t rank = 0; rank < 2; ++rank) EXPECT(job.has(rank, kPieces, 0));
}

TEST(uploads_in_progress_are_in_snapshots) {
  Uploads job(2);
  for (int64_t number = 0; number < 2; ++number) {
    for (size_t rank = 0; rank < 2; ++rank) job.piece(rank, number);
  }
  Host& host = job.seat[1].host;
  uint64_t position = 0;
  const int snapshot = host.snapshot(&position);
  job.piece(1, 2);
  job.piece(1, 3);
  host.stop();
  host.start(snapshot);
  EXPECT(job.has(1, kPieces, 0));
  job.piece(0, 2);
  job.piece(0, 3);
  EXPECT(job.has(0, kPieces, 0));
  close(snapshot);
}

TEST(uploads_into_what_a_collective_took_are_saved_where_they_are) {
  Uploads job(2);
  for (size_t rank = 0; rank < 2; ++rank) {
    job.tensors[rank] = job.seat[rank].constant(static_cast<float>(rank), kCount);
    job.take(rank);
  }
  for (size_t rank = 0; rank < 2; ++rank) job.piece(rank, 0);
  for (int64_t number = 1; number < kPieces; ++number) job.piece(0, number);
  Host& host = job.seat[1].host;
  std::vector<int> snapshots;
  for (int64_t number = 1; number < kPieces; ++number) {
    snapshots.push_back(host.snapshot());
    EXPECT_EQ(job.unshared(1), uint64_t{0});
    job.piece(1, number);
  }
  EXPECT_EQ(job.seat.figures().bytes_shared, kBytes);
  job.seat[0].scale({job.tensors[0]}, 2);
  EXPECT_EQ(job.seat[0].host.values(job.tensors[0])[0], 8.0f);
  for (const int snapshot : snapshots) {
    host.stop();
    host.start(snapshot);  // executes the other pieces again
    EXPECT(job.has(1, kPieces, 0));
    close(snapshot);
  }
}

TEST(uploads_are_not_changed_while_a_snapshot_saves_them) {
  for (const bool freed : {false, true}) {
    Uploads job(2);
    for (size_t rank = 0; rank < 2; ++rank) {
      job.tensors[rank] = job.seat[rank].constant(static_cast<float>(rank), kCount);
      job.take(rank);
      job.piece(rank, 0);
    }
    for (int64_t number = 1; number < kPieces; ++number) job.piece(0, number);
    Host& host = job.seat[1].host;
    // Nothing is copied yet.
    const Taken taken = host.session().snapshot(Manner::beside, [&] {
      if (freed) {
        host.free(job.tensors[1].id);
      } else {
        for (int64_t number = 1; number < kPieces; ++number) job.piece(1, number);
        job.seat[1].scale({job.tensors[1]}, 3);
      }
      host.wait_consumed();
      job.seat[0].scale({job.tensors[0]}, 2);
      job.seat[0].host.wait_consumed();
    });
    const File file(taken.fd);
    const Snapshot snapshot = read_snapshot(file.fd(), file_bytes(host.arena()));
    EXPECT_EQ(snapshot.extents.size(), size_t{1});
    EXPECT_EQ(snapshot.extents[0].count, kPiece * sizeof(float));
    std::vector<float> saved(kPiece);
    Arena(host.arena()).read(snapshot.extents[0].offset, std::as_writable_bytes(std::span(saved)));
    for (const float each : saved) EXPECT_EQ(each, 4.0f);
    EXPECT_EQ(job.seat[0].host.values(job.tensors[0])[0], 8.0f);
    if (!freed) EXPECT_EQ(host.values(job.tensors[1])[0], 12.0f);
  }
}

TEST(uploads_of_other_bytes_by_one_name_stop_the_session) {
  Uploads job(2);
  job.piece(0, 0);
  const std::vector<float> values(kPiece, 5);
  Writer record = read_payload(job.tensors[1].id, 0, kPiece * sizeof(float));
  record.put(ContentName{7, 7});
  record.put_bytes(values.data(), kPiece * sizeof(float));
  job.seat[1].host.append(RecordKind::write, kNamed, record);
  EXPECT(job.seat[1].host.corruption().find("a copy to the device") != std::string::npos);
}
