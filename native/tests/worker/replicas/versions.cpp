// Bytes with several owners: changes, snapshots, restored sessions, and the end of the last owner.
#include "tests/worker/replicas/company.h"

using namespace sing;
using namespace sing::test;

namespace {

constexpr int64_t kLarge = 1 << 20;
constexpr uint64_t kBytes = Rank::kCount * sizeof(float);

// The value of the only large tensor of a snapshot.
float saved_value(Rank& rank, int snapshot) {
  const File file(snapshot);
  const auto extents = read_snapshot(file.fd(), file_bytes(rank.host.arena())).extents;
  EXPECT_EQ(extents.size(), size_t{1});
  std::vector<float> values(extents[0].count / sizeof(float));
  read_file(rank.host.arena(), extents[0].offset, std::as_writable_bytes(std::span(values)));
  EXPECT_EQ(values.size(), static_cast<size_t>(kLarge));
  for (const float each : values) EXPECT_EQ(each, values[0]);
  return values[0];
}

// Takes a snapshot of a rank; `meanwhile` runs before the first byte of it is copied.
int snapshot_while(Rank& rank, const std::function<void()>& meanwhile) {
  const Taken taken = rank.host.session().snapshot(Manner::beside, meanwhile);
  rank.host.commit(taken.position);
  return taken.fd;
}

}  // namespace

TEST(versions_stay_when_one_owner_changes_its_bytes) {
  Company seat(3);
  std::vector<Tensor> tensors;
  seat.each([&](Rank& rank) { tensors.push_back(rank.constant(1)); });
  seat[1].scale({tensors[1]}, 2);
  EXPECT_EQ(seat[1].value(tensors[1]), 2.0f);
  EXPECT_EQ(seat.figures().bytes_shared, kBytes);
  const std::vector<float> part(10, 9);
  Writer record = read_payload(tensors[0].id, 0, 40);
  record.put_bytes(part.data(), 40);
  seat[0].host.append(RecordKind::write, 0, record);
  EXPECT_EQ(seat[0].host.values(tensors[0])[9], 9.0f);
  EXPECT_EQ(seat[0].host.values(tensors[0])[10], 1.0f);
  EXPECT_EQ(seat.figures().bytes_shared, uint64_t{0});
  EXPECT_EQ(seat[2].value(tensors[2]), 1.0f);
}

TEST(versions_stay_when_one_owner_is_overwritten_or_resized) {
  Company seat(4);
  std::vector<Tensor> tensors;
  seat.each([&](Rank& rank) { tensors.push_back(rank.constant(1)); });
  const std::vector<float> values(Rank::kCount, 5);
  seat[0].host.write(tensors[0], values.data());
  Writer record;
  record.put<uint64_t>(tensors[1].id);
  record.put<uint64_t>(kBytes / 2);
  seat[1].host.append(RecordKind::resize, 0, record);
  tensors[1].sizes = {Rank::kCount / 2};
  seat[1].scale({tensors[1]}, 3);
  const uint32_t fill = seat[2].host.define("aten::fill_", "Scalar");
  seat[2].host.call(CallRecord(fill, 2, 1).tensor(tensors[2]).real(7).returns_nothing());
  EXPECT_EQ(seat[0].value(tensors[0]), 5.0f);
  EXPECT_EQ(seat[1].value(tensors[1]), 3.0f);
  EXPECT_EQ(seat[2].value(tensors[2]), 7.0f);
  EXPECT_EQ(seat[3].value(tensors[3]), 1.0f);
}

TEST(versions_in_a_snapshot_are_not_changed_by_other_owners) {
  for (const bool freed : {false, true}) {
    Company seat(2);
    std::vector<Tensor> tensors;
    seat.each([&](Rank& rank) { tensors.push_back(rank.constant(1, kLarge)); });
    const int fd = snapshot_while(seat[0], [&] {
      if (freed) seat[0].host.free(tensors[0].id);
      seat[0].host.wait_consumed();
      seat[1].scale({tensors[1]}, 2);
      seat[1].host.wait_consumed();
    });
    EXPECT_EQ(saved_value(seat[0], fd), 1.0f);
    EXPECT_EQ(seat[1].value(tensors[1]), 2.0f);
  }
}

TEST(versions_in_a_snapshot_are_not_changed_by_their_session) {
  Company seat(2);
  std::vector<Tensor> tensors;
  seat.each([&](Rank& rank) { tensors.push_back(rank.constant(1, kLarge)); });
  const int fd = snapshot_while(seat[0], [&] {
    seat[0].scale({tensors[0]}, 2);
    seat[0].host.wait_consumed();
    seat[1].scale({tensors[1]}, 2);
    seat[1].scale({tensors[1]}, 2);
    seat[1].host.wait_consumed();
  });
  EXPECT_EQ(seat[0].value(tensors[0]), 2.0f);
  EXPECT_EQ(seat[1].value(tensors[1]), 4.0f);
  EXPECT_EQ(saved_value(seat[0], fd), 1.0f);
}

TEST(versions_of_restored_sessions_are_held_once_again) {
  // Loaded, and mapped from the arena.
  for (const uint64_t mapped_bytes : {uint64_t{1} << 40, uint64_t{4096}}) {
    Company seat(3, /*checks=*/true, mapped_bytes);
    std::vector<std::vector<Tensor>> all;
    seat.each([&](Rank& rank) {
      all.push_back({rank.constant(1, kLarge), rank.constant(2), rank.constant(3, 10)});
      rank.scale(all.back(), 2);
    });
    seat.each([&](Rank& rank) {
      uint64_t position = 0;
      const File file(rank.host.snapshot(&position));
      rank.host.commit(position);
      rank.host.stop();
      rank.host.start(file.fd());
    });
    // The last worker of the three has ended: nothing is left of the versions before.
    const uint64_t squashed = seat.figures().squashed;
    size_t at = 0;
    seat.each([&](Rank& rank) { rank.scale(all[at++], 3); });
    EXPECT_EQ(seat.figures().squashed, squashed + 2);
    EXPECT_EQ(seat.figures().bytes_shared, 2 * (kLarge + Rank::kCount + 10) * sizeof(float));
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(seat[i].value(all[i][0]), 6.0f);
      EXPECT_EQ(seat[i].value(all[i][1]), 12.0f);
      EXPECT_EQ(seat[i].value(all[i][2]), 18.0f);
    }
  }
}

TEST(versions_are_found_by_a_session_that_comes_from_another_process) {
  for (const uint64_t mapped_bytes : {uint64_t{1} << 40, uint64_t{4096}}) {
    Company seat(2, /*checks=*/true, mapped_bytes);
    Replicas elsewhere;
    std::vector<std::vector<Tensor>> all;
    seat.each([&](Rank& rank) {
      all.push_back({rank.constant(1, kLarge), rank.constant(2, kLarge), rank.constant(3)});
      rank.scale(all.back(), 2);
    });
    Host& moved = seat[1].host;
    const auto move = [&](Replicas* to) {
      uint64_t position = 0;
      const File file(moved.snapshot(&position));
      moved.commit(position);
      moved.options.replicas = to;
      moved.prepare(file.fd());
      moved.take_over();
    };
    move(&elsewhere);
    for (size_t i = 0; i < 2; ++i) seat[i].scale({all[i][0], all[i][2]}, 3);
    EXPECT_EQ(seat[1].value(all[1][0]), 6.0f);
    EXPECT_EQ(seat.figures().bytes_shared, uint64_t{0});
    move(&seat.replicas);
    EXPECT_EQ(seat.figures().bytes_shared, 2 * kLarge * sizeof(float));
    const uint64_t squashed = seat.figures().squashed;
    for (size_t i = 0; i < 2; ++i) {
      seat[i].scale({all[i][0], all[i][1]}, 5);
      seat[i].host.wait_consumed();
    }
    EXPECT_EQ(seat.figures().squashed, squashed + 1);
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(seat[i].value(all[i][0]), 30.0f);
      EXPECT_EQ(seat[i].value(all[i][1]), 20.0f);
      EXPECT_EQ(seat[i].value(all[i][2]), 18.0f);
    }
  }
}

TEST(versions_end_with_their_last_owner) {
  for (int order = 0; order < 6; ++order) {
    Company seat(3);
    std::vector<Tensor> tensors;
    seat.each([&](Rank& rank) {
      tensors.push_back(rank.constant(1));
      rank.multiply(tensors.back(), tensors.back());
    });
    EXPECT_EQ(seat.figures().versions, uint64_t{2});
    std::vector<size_t> ranks{0, 1, 2};
    for (int i = 0; i < order; ++i) std::next_permutation(ranks.begin(), ranks.end());
    for (const size_t rank : ranks) {
      if (rank == 1) seat[rank].host.free(tensors[rank].id);
      seat[rank].host.stop();
    }
    EXPECT_EQ(seat.figures().versions, uint64_t{0});
    EXPECT_EQ(seat.figures().bytes_shared, uint64_t{0});
  }
}
