// Large blocks of memory that are kept for the next tensors.
#include "worker/state/blocks.h"

#include <ATen/ATen.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "tests/check.h"

using namespace sing;
using namespace sing::test;

namespace {

constexpr size_t kBytes = Blocks::kLeastBytes;

TEST(a_freed_block_is_the_next_one_of_its_size) {
  Blocks& blocks = Blocks::get();
  blocks.empty();
  const void* first = nullptr;
  {
    const c10::DataPtr data = blocks.allocate(kBytes);
    first = data.get();
    CHECK(reinterpret_cast<uintptr_t>(first) % (2 << 20) == 0);
    std::memset(data.get(), 1, kBytes);
  }
  CHECK(blocks.kept() == kBytes);
  const c10::DataPtr again = blocks.allocate(kBytes);
  CHECK(again.get() == first);
  CHECK(blocks.kept() == 0);
}

TEST(memory_from_elsewhere_is_kept_as_a_block_and_freed_in_its_own_way) {
  static std::vector<void*> freed;
  freed.clear();
  const auto free = [](void* data, size_t) {
    freed.push_back(data);
    std::free(data);
  };
  Blocks& blocks = Blocks::get();
  blocks.empty();
  void* const large = std::malloc(kBytes);
  {
    const c10::DataPtr adopted = blocks.adopt(large, kBytes, free);
  }
  CHECK(freed.empty());
  CHECK(blocks.kept() == kBytes);
  {
    CHECK(blocks.allocate(kBytes).get() == large);
  }
  blocks.empty();
  CHECK(freed == std::vector<void*>{large});
  void* const small = std::malloc(kBytes - 1);
  {
    const c10::DataPtr adopted = blocks.adopt(small, kBytes - 1, free);
  }
  CHECK(freed == (std::vector<void*>{large, small}));
}

TEST(a_block_in_use_is_nobody_elses) {
  Blocks& blocks = Blocks::get();
  blocks.empty();
  const c10::DataPtr one = blocks.allocate(kBytes), other = blocks.allocate(kBytes);
  CHECK(one.get() != other.get());
  std::memset(one.get(), 1, kBytes);
  std::memset(other.get(), 2, kBytes);
  CHECK(static_cast<const char*>(one.get())[kBytes - 1] == 1);
}

TEST(a_block_of_another_size_takes_the_place_of_what_was_kept) {
  Blocks& blocks = Blocks::get();
  blocks.empty();
  for (int i = 0; i < 2; ++i) {
    const c10::DataPtr one = blocks.allocate(kBytes), other = blocks.allocate(kBytes);
  }
  CHECK(blocks.kept() == 2 * kBytes);
  {
    const c10::DataPtr slightly_less = blocks.allocate(kBytes + kBytes / 100);
  }
  // The 32 MiB block was too small: one of the two was freed, and the other for the rest.
  CHECK(blocks.kept() == kBytes + kBytes / 100);
  {
    const c10::DataPtr fits = blocks.allocate(kBytes);
  }
  CHECK(blocks.kept() == kBytes + kBytes / 100);
  {
    const c10::DataPtr far_larger = blocks.allocate(3 * kBytes);
  }
  CHECK(blocks.kept() == 3 * kBytes);
}

TEST(no_more_is_kept_than_a_gibibyte) {
  Blocks& blocks = Blocks::get();
  blocks.empty();
  {
    std::vector<c10::DataPtr> used;
    for (size_t i = 0; i < 2 * Blocks::kKeptBytes / kBytes; ++i) {
      used.push_back(blocks.allocate(kBytes));
    }
  }
  CHECK(blocks.kept() == Blocks::kKeptBytes);
  blocks.empty();
  CHECK(blocks.kept() == 0);
}

TEST(what_does_not_fit_into_the_machine_is_an_error) {
  Blocks& blocks = Blocks::get();
  {
    const c10::DataPtr kept = blocks.allocate(kBytes);
  }
  bool refused = false;
  try {
    blocks.allocate(size_t{1} << 60);
  } catch (const c10::Error&) {
    refused = true;
  }
  CHECK(refused);
  CHECK(blocks.kept() == 0);
}

TEST(small_blocks_are_the_heaps_and_are_freed_by_it) {
  Blocks& blocks = Blocks::get();
  blocks.empty();
  blocks.raw_deallocate(blocks.raw_allocate(1000));
  {
    const c10::DataPtr small = blocks.allocate(kBytes - 1);
  }
  CHECK(blocks.kept() == 0);
  blocks.raw_deallocate(blocks.raw_allocate(kBytes));
  CHECK(blocks.kept() == kBytes);
}

}  // namespace
