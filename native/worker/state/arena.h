// A session's arena: one sparse file, owned by the agent, with the bytes of saved storages.
//
// Each storage of a snapshot lies in an extent: a page-aligned stretch of the file that nothing
// else uses. The extents of a snapshot that the agent has are never written again; see snapshot.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace sing {

// Location of one storage's bytes. Two extents with the same offset and version always hold the
// same bytes, for every reader.
struct Extent {
  uint64_t offset = 0;
  uint64_t count = 0;
  uint64_t version = 0;  // 0: nowhere

  explicit operator bool() const noexcept { return version != 0; }
  bool operator==(const Extent&) const = default;
};

// An open file, closed by the destructor.
class File {
 public:
  explicit File(int fd) noexcept : fd_(fd) {}
  File(File&& other) noexcept : fd_(other.release()) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  File& operator=(File&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~File();
  int fd() const noexcept { return fd_; }
  int release() noexcept { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

void read_file(int fd, uint64_t offset, std::span<std::byte> into);
void write_file(int fd, uint64_t offset, std::span<const std::byte> bytes);

class MappedExtents;

class Arena {
 public:
  // The caller keeps ownership of `fd`.
  explicit Arena(int fd);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { close_view(); }

  uint64_t bytes() const;
  // Makes the file at least as long as `bytes`.
  void grow(uint64_t bytes);
  void read(uint64_t offset, std::span<std::byte> into) const;
  // From any thread.
  void write(uint64_t offset, std::span<const std::byte> bytes);
  // Writes zeros, so that the file has memory there.
  void fill(uint64_t offset, uint64_t count);
  // Maps the file for write() until close_view(), while no thread writes, if that is faster for so
  // many writers. Threads that write to the file itself take turns in the kernel (it locks the
  // file), those that write to memory do not.
  void open_view(unsigned writers);
  void close_view() noexcept;
  // Maps the bytes from `offset` in place of what is mapped there. `shared`: writes go to the file;
  // else they stay private. Returns false if the process has reached its limit of mappings.
  bool map(uint64_t offset, std::span<std::byte> place, bool shared) const noexcept;
  // What map_extent() has mapped; outlives the arena.
  const std::shared_ptr<MappedExtents>& mapped() const noexcept { return mapped_; }
  // Returns the memory of a range to the system.
  void punch(uint64_t offset, uint64_t count);

 private:
  File file_;
  std::span<std::byte> view_;
  const std::shared_ptr<MappedExtents> mapped_;
};

// The unused ranges of an arena.
class FreeRanges {
 public:
  // All ranges except `used`, which may overlap (several snapshots share extents).
  explicit FreeRanges(std::vector<Extent> used);

  // Takes a range of `count` bytes: the smallest gap that is large enough, or the end.
  uint64_t take(uint64_t count);
  // End of the last extent: the file must be at least as long.
  uint64_t end() const noexcept { return end_; }
  // The gaps that are left, without what lies beyond end().
  const std::multimap<uint64_t, uint64_t>& gaps() const noexcept { return gaps_; }

 private:
  std::multimap<uint64_t, uint64_t> gaps_;  // count, offset
  uint64_t end_ = 0;
};

}  // namespace sing
