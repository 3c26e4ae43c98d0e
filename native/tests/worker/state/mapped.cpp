// Storages whose memory is mapped from the arena until they are written.
#include "worker/state/mapped.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <thread>

#include "tests/check.h"
#include "tests/harness.h"
#include "worker/state/storages.h"

using namespace sing;
using namespace sing::test;

namespace {

constexpr uint64_t kBytes = (5 << 20) + 100;  // more than two huge pages, and not a multiple
constexpr uint64_t kRoom = (6 << 20) + kPageBytes;
constexpr std::byte kOne{1}, kTwo{2}, kNine{9};
const Extent kExtent{3 * kPageBytes, kBytes, 7};

struct Loading {
  Loading() {
    arena.grow(kExtent.offset + kRoom);
    arena.write(kExtent.offset, Bytes(kBytes, kOne));
    storages.map_from(&arena, kPageBytes);
    storages.allocate(1, kRoom);
    storages.restore(storages.at(1), kExtent, [](c10::Storage storage, Extent) {
      c10::Storage* const kept = new c10::Storage(std::move(storage));
      loaded.reset(kept);
      return nullptr;
    });
    slot().storage = *std::exchange(loaded, nullptr);
  }
  Slot& slot() { return storages.at(1); }
  std::byte* data() { return static_cast<std::byte*>(slot().storage.mutable_data()); }
  Bytes bytes(uint64_t count = kBytes) {
    Bytes found(count);
    Storages::read(slot(), 0, found);
    return found;
  }
  Bytes in_arena() {
    Bytes found(kBytes);
    arena.read(kExtent.offset, found);
    return found;
  }

  static inline std::unique_ptr<c10::Storage> loaded;
  File file{memfd_create("arena", 0)};
  Arena arena{file.fd()};
  Word<uint64_t> granted{2 * kRoom};
  Storages storages{c10::Device(c10::DeviceType::CPU), &granted};
};

}  // namespace

TEST(what_is_mapped_is_read_in_place) {
  Loading loading;
  EXPECT(is_mapped(loading.slot().storage));
  populate({loading.data(), kBytes});
  EXPECT(loading.bytes() == Bytes(kBytes, kOne));
  EXPECT_EQ(loading.storages.resident(), kRoom);
  EXPECT_EQ(loading.storages.dirty(), uint64_t{0});
}

TEST(what_is_mapped_and_written_leaves_the_arena_as_it_is) {
  Loading loading;
  const std::byte* const before = loading.data();
  const Bytes other(100, kNine);
  loading.storages.write(loading.slot(), kBytes - 50, other);
  EXPECT(!is_mapped(loading.slot().storage));
  EXPECT(!loading.slot().saved);
  EXPECT_EQ(loading.data(), before);
  Bytes expected(kBytes + 50, kOne);
  std::fill(expected.end() - 100, expected.end(), kNine);
  EXPECT(loading.bytes(kBytes + 50) == expected);
  EXPECT(loading.in_arena() == Bytes(kBytes, kOne));
  EXPECT_EQ(loading.storages.dirty(), kRoom);
}

TEST(what_has_memory_of_its_own_does_not_mind_the_arena) {
  Loading loading;
  loading.storages.touch(loading.slot());
  loading.arena.write(kExtent.offset, Bytes(kBytes, kTwo));
  loading.arena.punch(0, kExtent.offset + kRoom);
  EXPECT(loading.bytes() == Bytes(kBytes, kOne));
}

TEST(zeros_behind_what_was_saved_are_filled_in) {
  Loading loading;
  loading.arena.write(kExtent.offset + kBytes, Bytes(1000, kNine));  // bytes of an earlier extent
  loading.storages.use(loading.slot());
  Bytes expected(kRoom, std::byte{0});
  std::fill(expected.begin(), expected.begin() + kBytes, kOne);
  EXPECT(loading.bytes(kRoom) == expected);
  loading.storages.touch(loading.slot());
  EXPECT(loading.bytes(kRoom) == expected);
}

TEST(who_reads_while_it_takes_memory_of_its_own_sees_nothing_of_it) {
  for (int round = 0; round < 20; ++round) {
    Loading loading;
    std::atomic<bool> done{false}, wrong{false};
    const std::byte* const data = loading.data();
    std::thread reader([&] {
      for (uint64_t at = 0; !done; at = (at + 4099) % kBytes) {
        if (static_cast<const volatile std::byte*>(data)[at] != kOne) wrong = true;
      }
    });
    loading.storages.touch(loading.slot());
    done = true;
    reader.join();
    EXPECT(!wrong);
  }
}

// By address: a sanitizer has mappings of its own, in any number.
TEST(memory_of_a_mapped_storage_is_given_back) {
  const auto is_unmapped = [](std::byte* page) {
    unsigned char resident = 0;
    return mincore(page, kPageBytes, &resident) == -1 && errno == ENOMEM;
  };
  for (int round = 0; round < 10; ++round) {
    Loading loading;
    if (round % 2) loading.storages.touch(loading.slot());
    std::byte* const data = loading.data();
    EXPECT(!is_unmapped(data));
    loading.storages.free(1);
    for (uint64_t at = 0; at < kRoom; at += kPageBytes) EXPECT(is_unmapped(data + at));
  }
}

TEST(what_is_written_through_a_view_is_in_the_file) {
  const File file(memfd_create("arena", 0));
  Arena arena(file.fd());
  constexpr uint64_t kPiece = (1 << 20) + 7;
  arena.grow(4 * (kPiece + kPageBytes));
  arena.open_view(/*writers=*/8);
  {
    std::vector<std::jthread> writers;
    for (uint64_t i = 0; i < 4; ++i) {
      writers.emplace_back(
          [&arena, i] { arena.write(i * kPiece, Bytes(kPiece, static_cast<std::byte>(i + 1))); });
    }
  }
  arena.grow(6 * kPiece);  // the view is as long as the file was
  arena.write(5 * kPiece - 1, Bytes(kPiece, kNine));
  arena.close_view();
  for (uint64_t i = 0; i < 4; ++i) {
    Bytes found(kPiece);
    arena.read(i * kPiece, found);
    EXPECT(found == Bytes(kPiece, static_cast<std::byte>(i + 1)));
  }
  Bytes found(kPiece);
  arena.read(5 * kPiece - 1, found);
  EXPECT(found == Bytes(kPiece, kNine));
}
