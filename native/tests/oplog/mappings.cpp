// Mappings that are replaced while another thread reads there.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>

#include "oplog/mapping.h"
#include "tests/check.h"

using namespace sing;
using namespace sing::test;

namespace {

constexpr size_t kCapacity = 16 * kPageBytes;
constexpr uint64_t kShared = 0x5a5a5a5a, kPrivate = 0xa5a5a5a5;

class Memory {
 public:
  explicit Memory(size_t bytes) : fd_(memfd_create("sing-test-mapping", MFD_CLOEXEC)) {
    if (fd_ < 0 || ftruncate(fd_, static_cast<off_t>(bytes)) != 0) throw_errno("memfd");
  }
  ~Memory() { close(fd_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

Word<uint64_t>& word(const Mapping& mapping) {
  return *reinterpret_cast<Word<uint64_t>*>(mapping.data());
}

bool is_mapped() {
  std::ifstream maps("/proc/self/maps");
  const std::string text{std::istreambuf_iterator<char>(maps), {}};
  return text.find("sing-test-mapping") != std::string::npos;
}

}  // namespace

TEST(whoever_reads_where_a_mapping_is_replaced_finds_the_one_or_the_other) {
  const Memory memory(kPageBytes);
  const Mapping at = map_file(memory.fd(), kPageBytes, true);
  word(at).store(kShared);
  std::atomic<bool> over{false}, strange{false};
  std::thread reader([&] {
    while (!over) {
      const uint64_t found = word(at).load();
      if (found != kShared && found != kPrivate) strange = true;
    }
  });
  for (int i = 0; i < 2000; ++i) {
    Mapping copy = map_private(kPageBytes);
    word(copy).store(kPrivate);
    replace_mapping(at, std::move(copy));
    replace_mapping(at, map_file(memory.fd(), kPageBytes, true));
  }
  over = true;
  reader.join();
  EXPECT(!strange);
  EXPECT_EQ(word(at).load(), kShared);
}

TEST(what_took_the_place_of_a_mapping_is_written_to_alone) {
  const Memory memory(kPageBytes);
  const Mapping at = map_file(memory.fd(), kPageBytes, true);
  word(at).store(kShared);
  replace_mapping(at, map_private(kPageBytes));
  EXPECT(!is_mapped());
  word(at).store(kPrivate);
  replace_mapping(at, map_file(memory.fd(), kPageBytes, true));
  EXPECT(is_mapped());
  EXPECT_EQ(word(at).load(), kShared);
}

TEST(a_ring_that_was_a_reservation_is_where_it_was) {
  const Memory memory(kCapacity);
  const Mapping ring = map_ring(memory.fd(), kCapacity, true);
  std::byte* const end = ring.data() + kCapacity;
  std::memcpy(end - 2, "abcd", 4);  // across the end
  reserve_at(ring);
  EXPECT(!is_mapped());
  // No other mapping gets the addresses meanwhile.
  const Mapping other = map_private(kCapacity);
  EXPECT(other.data() >= ring.data() + ring.size() || other.data() + kCapacity <= ring.data());
  map_ring_at(ring, memory.fd(), true);
  EXPECT_EQ(std::memcmp(end - 2, "abcd", 4), 0);
  EXPECT_EQ(std::memcmp(ring.data(), "cd", 2), 0);
}
