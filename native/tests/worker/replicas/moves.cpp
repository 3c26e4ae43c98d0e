// Sessions that move to another process of their job: see Note [Moves] in moved.h.
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <optional>
#include <string>

#include "tests/worker/replicas/company.h"
#include "worker/snapshot/moved.h"
#include "worker/state/mapped.h"

namespace sing::test {
namespace {

constexpr int64_t kLarge = 40000;
constexpr uint64_t kLargeBytes = kLarge * sizeof(float);

// What a session leaves with.
struct Luggage {
  // `pins`: what the target has may not end.
  explicit Luggage(Rank& rank, Replicas& target, bool pins = true)
      : pinned(target.pin()),
        departed(rank.host.session().depart(read_known(File(write_known(pinned.ids)).fd()))) {
    if (!pins) pinned.shares.clear();
  }

  Replicas::Pinned pinned;
  const Departed departed;
};

// Makes the target's worker; `base`: the snapshot that the agent has.
void prepare(Rank& rank, Replicas& target, const Luggage& luggage, int base = -1) {
  rank.host.options.replicas = &target;
  const Departed& departed = luggage.departed;
  rank.host.prepare(departed.tables.fd(), departed.contents.fd(), departed.carried.fd(), base);
}

// A rank in a process of its own, which does the same as the first one of the seat.
struct Pair {
  explicit Pair(bool checks = true) : seat(1, checks), moved(&elsewhere, checks) {}

  template <class Work>
  void each(const Work& work) {
    for (Rank* rank : {&seat[0], &moved}) {
      work(*rank);
      rank->host.wait_consumed();
    }
  }
  void move(int base = -1) {
    const Luggage luggage(moved, seat.replicas);
    prepare(moved, seat.replicas, luggage, base);
    moved.host.take_over();
  }

  Company seat;
  Replicas elsewhere;
  Rank moved;
};

// Two ranks that share a storage that is mapped from the arena of the first one.
struct MappedPair {
  MappedPair() {
    seat.each([&](Rank& rank) { tensors.push_back(rank.constant(1, kLarge)); });
    // What a snapshot has saved stays in the arena.
    uint64_t position = 0;
    base.emplace(seat[0].host.snapshot(&position));
    seat[0].host.commit(position);
    for (int i = 0; i < 2; ++i) {
      const Luggage luggage(seat[i], target);
      prepare(seat[i], target, luggage, i == 0 ? base->fd() : -1);
      seat[i].host.take_over();
    }
    EXPECT_EQ(target.figures().bytes_shared, kLargeBytes);
    EXPECT(mapped(0) && mapped(1));
  }
  bool mapped(int rank) {
    const auto& slots = seat[rank].host.session().state().storages.slots();
    return is_mapped(slots[tensors[rank].id].storage);
  }

  Replicas target;
  std::optional<File> base;
  Company seat{2, /*checks=*/false, /*mapped_bytes=*/4096};
  std::vector<Tensor> tensors;
};

void overwrite_part(Rank& rank, const Tensor& tensor) {
  const std::vector<float> part(100, 9);
  Writer record = read_payload(tensor.id, 0, 400);
  record.put_bytes(part.data(), 400);
  rank.host.append(RecordKind::write, 0, record);
}

void overwrite(Rank& rank, const Tensor& tensor) {
  const std::vector<float> other(kLarge, 9);
  rank.host.write(tensor, other.data());
}

struct Model {
  std::vector<Tensor> tensors;
  explicit Model(Rank& rank)
      : tensors{rank.constant(1, kLarge), rank.constant(2, 3000), rank.constant(3, 10)} {
    rank.scale(tensors, 2);
  }
};

TEST(a_moved_session_brings_only_what_is_not_there) {
  for (const bool checks : {false, true}) {
    Pair pair(checks);
    std::vector<Model> models;
    pair.each([&](Rank& rank) { models.emplace_back(rank); });
    const Tensor own = pair.moved.constant(5, 2000);
    pair.moved.host.wait_consumed();
    Luggage luggage(pair.moved, pair.seat.replicas);
    EXPECT_EQ(luggage.departed.omitted, uint64_t{2});
    EXPECT_EQ(luggage.departed.copied, checks ? kLargeBytes + 20000 : uint64_t{8000});
    prepare(pair.moved, pair.seat.replicas, luggage);
    luggage.pinned.shares.clear();
    pair.moved.host.take_over();
    EXPECT_EQ(pair.seat.figures().bytes_shared, kLargeBytes + 12000 + 40);
    // All of it is shared: one call is executed for both.
    const uint64_t squashed = pair.seat.figures().squashed;
    size_t at = 0;
    pair.each([&](Rank& rank) { rank.scale(models[at++].tensors, 3); });
    EXPECT_EQ(pair.seat.figures().squashed, squashed + 1);
    EXPECT_EQ(pair.moved.value(own), 5.0f);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(pair.moved.value(models[1].tensors[i]), 6.0f * static_cast<float>(i + 1));
    }
  }
}

TEST(what_a_moved_session_brings_is_shared_with_the_next) {
  Replicas target;
  Company seat(2);
  std::vector<Model> models;
  seat.each([&](Rank& rank) { models.emplace_back(rank); });
  for (int i = 0; i < 2; ++i) {
    const Luggage luggage(seat[i], target);
    EXPECT_EQ(luggage.departed.omitted, i == 0 ? uint64_t{0} : uint64_t{2});
    prepare(seat[i], target, luggage);
    seat[i].host.take_over();
  }
  EXPECT_EQ(target.figures().bytes_shared, kLargeBytes + 12000 + 40);
  EXPECT_EQ(seat.figures().versions, uint64_t{0});
  for (int i = 0; i < 2; ++i) seat[i].scale(models[i].tensors, 3);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(seat[i].value(models[i].tensors[0]), 6.0f);
}

TEST(what_a_session_carries_is_memory_of_its_storages_until_they_are_freed) {
  for (const bool prepared : {false, true}) {
    Replicas target;
    Company seat(1, /*checks=*/true, /*mapped_bytes=*/4096);
    Rank& rank = seat[0];
    const Tensor large = rank.constant(3, kLarge), small = rank.constant(2, 1000);
    rank.host.wait_consumed();
    if (prepared) {
      const Tensor more = rank.constant(9, kLarge);  // ends before it departs
      rank.host.wait_consumed();
      rank.host.session().preallocate();
      rank.host.free(more.id);
      rank.host.wait_consumed();
    }
    const Luggage luggage(rank, target);
    const int carried = luggage.departed.carried.fd();
    const uint64_t pages = (kLargeBytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    EXPECT_EQ(file_bytes(carried), pages);
    prepare(rank, target, luggage);
    rank.host.take_over();
    rank.scale({large, small}, 2);
    EXPECT_EQ(rank.value(large), 6.0f);
    EXPECT_EQ(rank.value(small), 4.0f);
    std::vector<float> written(kLarge);
    read_file(carried, 0, std::as_writable_bytes(std::span(written)));
    EXPECT_EQ(written, std::vector<float>(kLarge, 6));
    const auto memory = [&] {
      struct stat found{};
      EXPECT_EQ(fstat(carried, &found), 0);
      return static_cast<uint64_t>(found.st_blocks) * 512;
    };
    EXPECT_EQ(memory(), pages);
    rank.host.free(large.id);
    rank.host.wait_consumed();
    EXPECT_EQ(memory(), uint64_t{0});
  }
}

TEST(what_is_mapped_from_the_arena_of_one_session_stays_for_others) {
  // What the first session does with its storage, after which its arena is emptied.
  const std::vector<std::function<void(Rank&, const Tensor&)>> ends{
      [](Rank& rank, const Tensor& tensor) { rank.scale({tensor}, 3); },
      overwrite_part,
      [](Rank& rank, const Tensor& tensor) { rank.host.free(tensor.id); },
      overwrite,
      [](Rank&, const Tensor&) {},
  };
  for (const auto& end : ends) {
    MappedPair pair;
    auto& [target, base, seat, tensors] = pair;
    end(seat[0], tensors[0]);
    seat[0].host.wait_consumed();
    for (int i = 0; i < 2; ++i) {  // its arena has room again for what it does not need
      uint64_t position = 0;
      const File file(seat[0].host.snapshot(&position));
      seat[0].host.commit(position);
      seat[0].host.session().trim();
    }
    EXPECT_EQ(seat[1].value(tensors[1]), 1.0f);
    seat[0].host.stop();
    Arena arena(seat[0].host.arena());
    arena.punch(0, arena.bytes());
    EXPECT_EQ(seat[1].value(tensors[1]), 1.0f);
  }
}

TEST(what_is_mapped_from_the_arena_of_another_session_is_owned_before_it_changes) {
  const std::vector<std::function<void(Rank&, const Tensor&)>> changes{
      [](Rank& rank, const Tensor& tensor) { rank.scale({tensor}, 9); },
      overwrite_part,
      overwrite,
  };
  for (const auto& change : changes) {
    MappedPair pair;
    pair.seat[0].host.free(pair.tensors[0].id);
    pair.seat[0].host.wait_consumed();
    change(pair.seat[1], pair.tensors[1]);
    EXPECT_EQ(pair.seat[1].host.values(pair.tensors[1])[0], 9.0f);
    EXPECT(!pair.mapped(1));
  }
}

TEST(a_session_does_not_move_without_what_has_ended_meanwhile) {
  Pair pair;
  std::vector<Model> models;
  pair.each([&](Rank& rank) { models.emplace_back(rank); });
  {
    const Luggage luggage(pair.moved, pair.seat.replicas, /*pins=*/false);
    pair.seat[0].scale(models[0].tensors, 3);
    pair.seat[0].host.wait_consumed();
    std::string refusal;
    try {
      prepare(pair.moved, pair.seat.replicas, luggage);
    } catch (const std::exception& error) {
      refusal = error.what();
    }
    EXPECT_EQ(refusal, std::string("what the session shares is not held here any more"));
  }
  pair.moved.host.options.replicas = &pair.elsewhere;
  EXPECT_EQ(pair.seat.figures().bytes_shared, uint64_t{0});
  // It continues where it is, and its next snapshot has everything.
  EXPECT_EQ(pair.moved.value(models[1].tensors[0]), 2.0f);
  uint64_t position = 0;
  const File whole(pair.moved.host.snapshot(&position));
  pair.moved.host.commit(position);
  pair.moved.host.stop();
  pair.moved.host.start(whole.fd());
  EXPECT_EQ(pair.moved.value(models[1].tensors[0]), 2.0f);
  EXPECT_EQ(pair.moved.value(models[1].tensors[2]), 6.0f);
}

TEST(what_a_session_does_not_bring_stays_until_it_has_moved) {
  Pair pair;
  std::vector<Model> models;
  pair.each([&](Rank& rank) { models.emplace_back(rank); });
  {
    const Luggage luggage(pair.moved, pair.seat.replicas);
    EXPECT_EQ(luggage.departed.omitted, uint64_t{2});
    pair.seat[0].scale(models[0].tensors, 3);
    pair.seat[0].host.wait_consumed();
    prepare(pair.moved, pair.seat.replicas, luggage);
    pair.moved.host.take_over();
  }
  EXPECT_EQ(pair.moved.value(models[1].tensors[0]), 2.0f);
  pair.moved.scale(models[1].tensors, 3);
  EXPECT_EQ(pair.moved.value(models[1].tensors[2]), 18.0f);
  EXPECT_EQ(pair.seat.figures().bytes_shared, kLargeBytes + 12000 + 40);
}

TEST(a_moved_session_is_recovered_from_the_snapshot_before) {
  Pair pair;
  std::vector<Model> models;
  pair.each([&](Rank& rank) { models.emplace_back(rank); });
  Host& host = pair.moved.host;
  uint64_t position = 0;
  const File base(host.snapshot(&position));
  host.commit(position);
  pair.each([&](Rank& rank) { rank.scale(models[&rank == &pair.moved].tensors, 3); });
  pair.move(base.fd());
  pair.moved.scale(models[1].tensors, 5);
  // A snapshot that the agent does not get overwrites nothing that it has.
  const File lost(host.snapshot());
  pair.moved.scale(models[1].tensors, 7);
  host.wait_consumed();
  host.stop();
  host.start(base.fd());
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(pair.moved.value(models[1].tensors[i]), 210.0f * static_cast<float>(i + 1));
  }
}

TEST(a_session_without_a_snapshot_moves_and_is_recovered_from_its_log) {
  Pair pair;
  std::vector<Model> models;
  pair.each([&](Rank& rank) { models.emplace_back(rank); });
  pair.move();
  pair.moved.scale(models[1].tensors, 5);
  pair.moved.host.wait_consumed();
  pair.moved.host.stop();
  pair.moved.host.start();
  EXPECT_EQ(pair.moved.value(models[1].tensors[0]), 10.0f);
}

TEST(equal_storages_of_a_moved_session_stay_apart) {
  Pair pair;
  std::vector<std::vector<Tensor>> all;
  pair.each([&](Rank& rank) {
    all.push_back({rank.constant(4, kLarge), rank.constant(4, kLarge), rank.constant(4, kLarge)});
  });
  pair.move();
  EXPECT_EQ(pair.seat.figures().bytes_shared, kLargeBytes);
  pair.moved.scale({all[1][1]}, 2);
  EXPECT_EQ(pair.moved.value(all[1][0]), 4.0f);
  EXPECT_EQ(pair.moved.value(all[1][1]), 8.0f);
  EXPECT_EQ(pair.moved.value(all[1][2]), 4.0f);
  EXPECT_EQ(pair.seat[0].value(all[0][0]), 4.0f);
}

TEST(storages_that_would_share_one_version_stay_apart) {
  Pair pair;
  std::vector<Tensor> tensors;
  // The version in the seat is found by the hash of its bytes, too, as they are read.
  pair.each([&](Rank& rank) {
    tensors.push_back(rank.constant(2, kLarge));
    rank.scale({tensors.back()}, 2);
    rank.value(tensors.back());
  });
  const Tensor uploaded = pair.moved.constant(4, kLarge);
  pair.moved.host.wait_consumed();
  pair.move();
  EXPECT_EQ(pair.seat.figures().bytes_shared, kLargeBytes);
  pair.moved.scale({uploaded}, 2);
  EXPECT_EQ(pair.moved.value(tensors[1]), 4.0f);
  EXPECT_EQ(pair.moved.value(uploaded), 8.0f);
}

TEST(lists_of_contents_are_not_trusted) {
  Pair pair;
  std::vector<Model> models;
  pair.each([&](Rank& rank) { models.emplace_back(rank); });
  Luggage luggage(pair.moved, pair.seat.replicas);
  const auto refused = [&](int contents) {
    try {
      pair.moved.host.options.replicas = &pair.seat.replicas;
      pair.moved.host.prepare(luggage.departed.tables.fd(), contents,
                              luggage.departed.carried.fd());
    } catch (const std::exception&) {
      return true;
    }
    return false;
  };
  std::vector<std::byte> bytes(file_bytes(luggage.departed.contents.fd()));
  read_file(luggage.departed.contents.fd(), 0, bytes);
  const auto changed = [&](auto change) {
    std::vector<std::byte> copy = bytes;
    change(copy);
    File file(memfd_create("contents", MFD_CLOEXEC));
    write_file(file.fd(), 0, copy);
    return refused(file.fd());
  };
  EXPECT(changed([](auto& all) { all.pop_back(); }));
  EXPECT(changed([](auto& all) { all[9] ^= std::byte{1}; }));  // a content that is not there
  // The content of another storage, of another size.
  EXPECT(
      changed([](auto& all) { std::swap_ranges(&all[0], &all[4], &all[sizeof(ContentEntry)]); }));
  EXPECT(!changed([](auto&) {}));
}

}  // namespace
}  // namespace sing::test
