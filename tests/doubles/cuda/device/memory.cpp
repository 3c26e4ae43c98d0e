#include "device/memory.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "device/card.h"

namespace sing_double::memory {
namespace {

constexpr uint64_t kRange = 1ull << 42;  // addresses of one card
constexpr int kCards = 4;
constexpr size_t kPage = 2 << 20, kPatternMax = 32 << 20;
constexpr int kPattern = 0xCB;

struct Space {
  std::mutex mutex;
  char* base = nullptr;  // kCards ranges of addresses, then as many of bytes
  uint64_t next[kCards] = {};
  std::map<uint64_t, size_t> allocated, pinned;
};

Space& space() {
  static auto* one = new Space;
  return *one;
}

// The entry that contains a range, or the end.
auto containing(std::map<uint64_t, size_t>& ranges, const void* address, size_t bytes) {
  const uint64_t start = reinterpret_cast<uint64_t>(address);
  auto found = ranges.upper_bound(start);
  if (found == ranges.begin()) return ranges.end();
  --found;
  return start + bytes <= found->first + found->second ? found : ranges.end();
}

}  // namespace

void* allocate(int card, size_t bytes) {
  if (!charge(card, 0, static_cast<int64_t>(bytes))) return nullptr;
  Space& all = space();
  const std::lock_guard<std::mutex> guard(all.mutex);
  if (!all.base) {
    void* mapped = mmap(nullptr, 2 * kCards * kRange, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) abort();
    all.base = static_cast<char*>(mapped);
  }
  const size_t room = (bytes + kPage - 1) / kPage * kPage;
  if (all.next[card] + room > kRange) abort();
  char* address = all.base + card * kRange + all.next[card];
  all.next[card] += room;
  char* shadow = address + kCards * kRange;
  if (mprotect(shadow, room, PROT_READ | PROT_WRITE) != 0) abort();
  memset(shadow, kPattern, std::min(bytes, kPatternMax));
  all.allocated[reinterpret_cast<uint64_t>(address)] = bytes;
  return address;
}

bool release(void* address) {
  Space& all = space();
  const int card = card_of(address);
  size_t bytes = 0;
  {
    const std::lock_guard<std::mutex> guard(all.mutex);
    const auto found = all.allocated.find(reinterpret_cast<uint64_t>(address));
    if (found == all.allocated.end()) return false;
    bytes = found->second;
    all.allocated.erase(found);
    const size_t room = (bytes + kPage - 1) / kPage * kPage;
    void* shadow = static_cast<char*>(address) + kCards * kRange;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap(shadow, room, PROT_NONE, flags, -1, 0) == MAP_FAILED) abort();
  }
  charge(card, 0, -static_cast<int64_t>(bytes));
  return true;
}

int card_of(const void* address) {
  Space& all = space();
  const std::lock_guard<std::mutex> guard(all.mutex);
  const auto* at = static_cast<const char*>(address);
  if (!all.base || at < all.base || at >= all.base + kCards * kRange) return -1;
  return static_cast<int>((at - all.base) / kRange);
}

char* bytes_at(const void* address, size_t bytes) {
  Space& all = space();
  const std::lock_guard<std::mutex> guard(all.mutex);
  if (containing(all.allocated, address, bytes) == all.allocated.end()) return nullptr;
  return const_cast<char*>(static_cast<const char*>(address)) + kCards * kRange;
}

void pin(void* address, size_t bytes) {
  const std::lock_guard<std::mutex> guard(space().mutex);
  space().pinned[reinterpret_cast<uint64_t>(address)] = bytes;
}

bool unpin(void* address) {
  const std::lock_guard<std::mutex> guard(space().mutex);
  return space().pinned.erase(reinterpret_cast<uint64_t>(address)) == 1;
}

bool is_pinned(const void* address, size_t bytes) {
  const std::lock_guard<std::mutex> guard(space().mutex);
  return containing(space().pinned, address, bytes) != space().pinned.end();
}

}  // namespace sing_double::memory
