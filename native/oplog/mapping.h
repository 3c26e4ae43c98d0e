// Mappings of a session's memfds. Independent of torch.
#pragma once

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "oplog/layout.h"

namespace sing {

[[noreturn]] inline void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// A range of address space, unmapped by the destructor.
class Mapping {
 public:
  Mapping() = default;
  Mapping(void* data, size_t bytes) noexcept
      : data_(static_cast<std::byte*>(data)), bytes_(bytes) {}
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (data_) munmap(data_, bytes_);
  }

  std::byte* data() const noexcept { return data_; }
  size_t size() const noexcept { return bytes_; }
  // Gives up ownership: the range stays mapped, or is unmapped already.
  void release() noexcept { data_ = nullptr; }
  explicit operator bool() const noexcept { return data_ != nullptr; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

inline size_t file_bytes(int fd) {
  struct stat status{};
  if (fstat(fd, &status) != 0) throw_errno("cannot look at a shared memory file");
  return static_cast<size_t>(status.st_size);
}

// Maps the first `bytes` of a file, which must have at least that many: accessing a page beyond the
// end of a file raises SIGBUS. (The agent seals its files against shrinking.)
inline Mapping map_file(int fd, size_t bytes, bool writable) {
  if (file_bytes(fd) < bytes) throw std::runtime_error("a shared memory file is too short");
  void* data = mmap(nullptr, bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) throw_errno("cannot map a shared memory file");
  return Mapping(data, bytes);
}

inline constexpr int kReservation = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

// Maps a file twice in a row into a range of twice its size.
inline void map_ring_at(const Mapping& ring, int fd, bool writable) {
  const size_t capacity = ring.size() / 2;
  const int protection = PROT_READ | (writable ? PROT_WRITE : 0);
  for (size_t half = 0; half < 2; ++half) {
    if (mmap(ring.data() + half * capacity, capacity, protection, MAP_SHARED | MAP_FIXED, fd, 0) ==
        MAP_FAILED) {
      throw_errno("cannot map a log ring");
    }
  }
}

// Maps a ring twice in a row: the `capacity` bytes from any position are contiguous.
inline Mapping map_ring(int fd, size_t capacity, bool writable) {
  if (capacity < kPageBytes || !std::has_single_bit(capacity) || file_bytes(fd) != capacity) {
    throw std::runtime_error("a log ring has a size that no ring can have");
  }
  void* reserved = mmap(nullptr, 2 * capacity, PROT_NONE, kReservation, -1, 0);
  if (reserved == MAP_FAILED) throw_errno("cannot reserve addresses for a log ring");
  Mapping ring(reserved, 2 * capacity);
  map_ring_at(ring, fd, writable);
  return ring;
}

// Maps private memory of this process; no memory is used before it is written to.
inline Mapping map_private(size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kReservation, -1, 0);
  if (data == MAP_FAILED) throw_errno("cannot map memory");
  return Mapping(data, bytes);
}

// Replaces a mapping by a reservation of its addresses.
inline void reserve_at(const Mapping& at) {
  if (mmap(at.data(), at.size(), PROT_NONE, kReservation | MAP_FIXED, -1, 0) == MAP_FAILED) {
    throw_errno("cannot reserve addresses");
  }
}

// Atomically replaces a mapping by another one of its size: a concurrent reader finds either the
// old or the new one.
inline void replace_mapping(const Mapping& at, Mapping by) {
  if (mremap(by.data(), by.size(), at.size(), MREMAP_MAYMOVE | MREMAP_FIXED, at.data()) ==
      MAP_FAILED) {
    throw_errno("cannot replace a mapping");
  }
  by.release();
}

// A ClientPage, WorkerPage or AgentPage, with the bytes that follow it in its file.
template <class T>
class Page {
 public:
  Page() = default;
  explicit Page(Mapping mapping) noexcept : mapping_(std::move(mapping)) {}

  T* operator->() const noexcept { return get(); }
  T& operator*() const noexcept { return *get(); }
  T* get() const noexcept { return reinterpret_cast<T*>(mapping_.data()); }
  std::span<std::byte> following() const noexcept {
    return {mapping_.data() + kPageBytes, mapping_.size() - kPageBytes};
  }
  const Mapping& mapping() const noexcept { return mapping_; }
  Mapping take() noexcept { return std::move(mapping_); }

 private:
  Mapping mapping_;
};

// Maps a page that the agent has made, and `following` bytes after it. Checks magic and version, so
// that two versions of this code never share a session.
template <class T>
Page<T> map_page(int fd, bool writable, size_t following = 0) {
  Page<T> page(map_file(fd, kPageBytes + following, writable));
  if (page->magic != kMagic) throw std::runtime_error("a shared memory file is not a page of ours");
  if (page->version != kLayoutVersion) {
    throw std::runtime_error("a shared memory page has layout " + std::to_string(page->version) +
                             ", expected " + std::to_string(kLayoutVersion));
  }
  return page;
}

}  // namespace sing
