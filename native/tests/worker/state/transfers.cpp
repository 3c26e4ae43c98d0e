// Saving and loading concurrently with the main thread, step by step.
#include "worker/snapshot/transfers.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "oplog/futex.h"
#include "tests/check.h"
#include "tests/harness.h"

using namespace sing;
using namespace sing::test;

namespace {

constexpr uint64_t kBytes = 40'000;
constexpr uint64_t kPiece = 4096;

using Floats = std::vector<float>;

struct Saving {
  explicit Saving(Replicas* replicas = nullptr)
      : storages(c10::Device(c10::DeviceType::CPU), &granted, replicas) {
    arena.grow(4 * Storages::kLargeBytes);
  }

  Slot& saved(uint32_t id, std::byte value, uint64_t offset, uint64_t count = kBytes) {
    storages.allocate(id, count);
    const Bytes bytes(count, value);
    storages.write(storages.at(id), 0, bytes);
    Slot& slot = storages.at(id);
    const Extent extent{offset, count, id};
    storages.note_saved(slot, extent, saves.add(slot.storage, extent));
    return slot;
  }
  Bytes in_arena(uint64_t offset, uint64_t count = kBytes) {
    Bytes bytes(count);
    arena.read(offset, bytes);
    return bytes;
  }

  File file{memfd_create("arena", 0)};
  Arena arena{file.fd()};
  Word<uint64_t> granted{3 * kBytes};
  Storages storages;
  Transfers saves{Transfers::Direction::save, arena, storages.device(), kPiece};
};

constexpr std::byte kOne{1}, kTwo{2}, kNine{9};

// The arrivals for which a worker that starts from a snapshot waits.
struct Arriving {
  explicit Arriving(uint64_t extents) {
    if (ftruncate(file.fd(), static_cast<off_t>(2 * kPageBytes + extents)) != 0) fail("", 0, "");
    mapping = map_file(file.fd(), 2 * kPageBytes + extents, true);
  }
  void arrive(uint64_t index, Arrival arrival) {
    mapping.data()[kPageBytes + index] = static_cast<std::byte>(arrival);
    auto* bell = reinterpret_cast<Word<uint32_t>*>(mapping.data());
    bell->fetch_add(1);
    futex_wake(bell);
  }
  bool wanted(uint64_t index) const {
    return reinterpret_cast<const Word<uint8_t>*>(mapping.data())[2 * kPageBytes + index].load();
  }
  File file{memfd_create("readiness", 0)};
  Mapping mapping;
};

}  // namespace

TEST(what_is_written_was_saved_before) {
  Saving saving;
  Slot& slot = saving.saved(1, kOne, 0);
  saving.saves.schedule({slot.transfer});  // and no thread works on it
  EXPECT_EQ(saving.storages.dirty(), uint64_t{0});
  const Bytes other(100, kNine);
  saving.storages.write(slot, 200, other);
  EXPECT(saving.in_arena(0) == Bytes(kBytes, kOne));
  EXPECT_EQ(saving.storages.dirty(), kBytes);
  saving.saves.finish();
}

TEST(what_is_freed_is_saved_and_counts_until_then) {
  Saving saving;
  saving.saved(1, kOne, 0);
  saving.saved(2, kTwo, 10 * kPageBytes);
  saving.saves.schedule({saving.storages.at(1).transfer, saving.storages.at(2).transfer});
  saving.storages.free(1);
  EXPECT_EQ(saving.storages.resident(), 2 * kBytes);
  EXPECT(saving.storages.holds_freed());
  // There is room for one more, and only if the freed one is saved at once.
  saving.storages.allocate(3, kBytes);
  saving.storages.use(saving.storages.at(3));
  EXPECT_EQ(saving.storages.resident(), 3 * kBytes);
  saving.storages.allocate(4, kBytes);
  saving.storages.use(saving.storages.at(4));
  EXPECT_EQ(saving.storages.resident(), 3 * kBytes);
  EXPECT(!saving.storages.holds_freed());
  EXPECT(saving.in_arena(0) == Bytes(kBytes, kOne));
  saving.storages.allocate(5, kBytes);
  EXPECT_THROWS(c10::OutOfMemoryError, saving.storages.use(saving.storages.at(5)));
  saving.saves.help(2, Transfers::Pace::full);
  saving.saves.finish();
  EXPECT(saving.in_arena(10 * kPageBytes) == Bytes(kBytes, kTwo));
}

TEST(what_is_freed_in_a_seat_is_saved_at_once) {
  Replicas replicas;
  Saving saving(&replicas);
  constexpr uint64_t kLarge = Storages::kLargeBytes;
  saving.granted.store(2 * kLarge);
  for (uint32_t id : {1, 2}) saving.saved(id, kOne, (id - 1) * 2 * kLarge, kLarge);
  saving.saves.schedule({saving.storages.at(1).transfer, saving.storages.at(2).transfer});
  saving.storages.free(1);  // and no thread works on it
  EXPECT_EQ(saving.storages.resident(), kLarge);
  EXPECT(!saving.storages.holds_freed());
  EXPECT(saving.in_arena(0, kLarge) == Bytes(kLarge, kOne));
  EXPECT(saving.in_arena(2 * kLarge, kLarge) == Bytes(kLarge));
  saving.storages.give_up(2);
  EXPECT_EQ(saving.storages.resident(), uint64_t{0});
  EXPECT(saving.in_arena(2 * kLarge, kLarge) == Bytes(kLarge, kOne));
  saving.saves.finish();
}

TEST(what_takes_over_a_number_leaves_the_bytes_before_it_to_the_snapshot) {
  Saving saving;
  Slot& slot = saving.saved(1, kOne, 0);
  saving.saves.schedule({slot.transfer});
  const Slot fresh = [&] {
    saving.storages.allocate(9, kBytes);
    saving.storages.use(saving.storages.at(9));
    return saving.storages.at(9);
  }();
  saving.storages.bind(1, fresh.storage, kBytes);
  saving.storages.lose(1, std::make_shared<const std::string>("an operator"), kBytes);
  saving.saves.help(1, Transfers::Pace::gentle);
  saving.saves.finish();
  EXPECT(saving.in_arena(0) == Bytes(kBytes, kOne));
  saving.storages.sweep();
  EXPECT_EQ(saving.storages.resident(), kBytes);
}

TEST(a_snapshot_that_cannot_be_written_fails_and_the_program_goes_on) {
  Saving saving;
  const File readable(
      open(("/proc/self/fd/" + std::to_string(saving.file.fd())).c_str(), O_RDONLY));
  Arena arena(readable.fd());
  Transfers saves(Transfers::Direction::save, arena, saving.storages.device(), kPiece);
  saving.storages.allocate(1, kBytes);
  Slot& slot = saving.storages.at(1);
  saving.storages.use(slot);
  const Extent extent{0, kBytes, 1};
  saving.storages.note_saved(slot, extent, saves.add(slot.storage, extent));
  saves.schedule({slot.transfer});
  saving.storages.touch(slot);
  EXPECT_THROWS(std::exception, saves.finish());
}

TEST(a_save_that_failed_keeps_no_thread_waiting) {
  Saving saving;
  const File readable(
      open(("/proc/self/fd/" + std::to_string(saving.file.fd())).c_str(), O_RDONLY));
  Arena arena(readable.fd());
  Transfers saves(Transfers::Direction::save, arena, saving.storages.device(), kPiece);
  for (const uint32_t id : {1, 2}) {
    saving.storages.allocate(id, kBytes);
    Slot& slot = saving.storages.at(id);
    saving.storages.use(slot);
    const Extent extent{id * 10 * kPageBytes, kBytes, id};
    saving.storages.note_saved(slot, extent, saves.add(slot.storage, extent));
  }
  saves.schedule({saving.storages.at(1).transfer, saving.storages.at(2).transfer});
  saves.help(1, Transfers::Pace::full);  // fails in the middle of the first
  EXPECT_THROWS(std::exception, saves.finish());
  // The main thread comes before the snapshot is undone.
  for (const uint32_t id : {1, 2}) saving.storages.touch(saving.storages.at(id));
  saves.reset();
  saves.finish();  // nothing is left of it
}

TEST(free_ranges_are_what_no_extent_covers) {
  FreeRanges free({{0, 4096, 1}, {3 * kPageBytes, 5000, 1}, {3 * kPageBytes, 5000, 1}});
  EXPECT_EQ(free.take(3 * kPageBytes), 5 * kPageBytes);  // no gap is as large
  EXPECT_EQ(free.take(100), kPageBytes);
  EXPECT_EQ(free.take(kPageBytes), 2 * kPageBytes);
  EXPECT_EQ(free.take(1), 8 * kPageBytes);
  EXPECT_EQ(free.end(), 9 * kPageBytes);
  EXPECT(free.gaps().empty());
}

TEST(a_worker_runs_while_its_state_arrives) {
  Host host;
  host.start();
  const auto add = host.define("aten::add_", "Scalar");
  const auto a = host.upload(Floats(5000, 1), {5000});
  const auto b = host.upload(Floats(6000, 2), {6000});
  host.wait_consumed();
  uint64_t position = 0;
  const File snapshot(host.snapshot(&position));
  host.stop();
  host.commit(position);
  Arriving arriving(2);
  host.start(snapshot.fd(), arriving.file.fd());
  EXPECT_EQ(host.worker().loading_bytes.load(), uint64_t{44'000});
  EXPECT(host.synchronize().ok());
  host.call(CallRecord(add, 3, 1).tensor(b).integer(1).integer(1).returns_nothing());
  const uint64_t request = host.begin_request(RecordKind::read, read_payload(b.id, 0, b.bytes()));
  while (!arriving.wanted(1)) sched_yield();
  EXPECT(!arriving.wanted(0));
  arriving.arrive(1, Arrival::there);
  host.wait_answer(request);
  Bytes bytes;
  while (bytes.size() < b.bytes()) host.take(bytes, b.bytes());
  host.client().answer_wanted.store(0);
  EXPECT_EQ(host.worker().loading_bytes.load(), uint64_t{20'000});
  arriving.arrive(0, Arrival::there);
  EXPECT(host.values(a) == Floats(5000, 1));
  EXPECT(host.values(b) == Floats(6000, 3));
  EXPECT_EQ(host.worker().loading_bytes.load(), uint64_t{0});
}

TEST(state_that_cannot_be_had_ends_the_run_with_a_reason) {
  Host host;
  host.start();
  host.upload(Floats(5000, 1), {5000});
  host.wait_consumed();
  uint64_t position = 0;
  const File snapshot(host.snapshot(&position));
  host.stop();
  Arriving arriving(1);
  host.start(snapshot.fd(), arriving.file.fd());
  EXPECT(host.synchronize().ok());
  arriving.arrive(0, Arrival::failed);
  EXPECT(host.corruption().find("could not be read") != std::string::npos);
}

TEST(an_end_does_not_wait_for_what_has_not_arrived) {
  Host host;
  host.start();
  const auto a = host.upload(Floats(5000, 1), {5000});
  host.wait_consumed();
  const File snapshot(host.snapshot());
  host.stop();
  Arriving arriving(1);
  host.start(snapshot.fd(), arriving.file.fd());
  host.begin_request(RecordKind::read, read_payload(a.id, 0, a.bytes()));
  while (!arriving.wanted(0)) sched_yield();
  host.stop();
  EXPECT(!host.running());
}
