#include "worker/state/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "oplog/mapping.h"
#include "worker/state/mapped.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // since Linux 5.14
#endif

namespace sing {

namespace {

// For so few the file is faster: new pages of a mapping are cleared first.
constexpr unsigned kFileWritersMax = 3;

// Gives a mapping its pages. Without memory for them this fails, where a write would be fatal.
bool has_pages(std::span<std::byte> mapped) noexcept {
  const auto begin = reinterpret_cast<uintptr_t>(mapped.data()) / kPageBytes * kPageBytes;
  const auto end = reinterpret_cast<uintptr_t>(mapped.data() + mapped.size());
  return madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE) == 0;
}

uint64_t whole_pages(uint64_t count) { return (count + kPageBytes - 1) / kPageBytes * kPageBytes; }

}  // namespace

File::~File() {
  if (fd_ >= 0) close(fd_);
}

void read_file(int fd, uint64_t offset, std::span<std::byte> into) {
  while (!into.empty()) {
    const ssize_t done = pread(fd, into.data(), into.size(), static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) throw_errno("cannot read saved state");
    if (done == 0) throw std::runtime_error("saved state ends too early");
    into = into.subspan(static_cast<size_t>(done));
    offset += static_cast<uint64_t>(done);
  }
}

void write_file(int fd, uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t done = pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) throw_errno("cannot write state");
    bytes = bytes.subspan(static_cast<size_t>(done));
    offset += static_cast<uint64_t>(done);
  }
}

Arena::Arena(int fd)
    : file_(fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0)),
      mapped_(std::make_shared<MappedExtents>()) {
  if (file_.fd() < 0) throw std::runtime_error("a session without an arena");
}

uint64_t Arena::bytes() const { return file_bytes(file_.fd()); }

void Arena::grow(uint64_t bytes) {
  if (bytes > this->bytes() && ftruncate(file_.fd(), static_cast<off_t>(bytes)) != 0) {
    throw_errno("cannot make room for state");
  }
}

void Arena::read(uint64_t offset, std::span<std::byte> into) const {
  read_file(file_.fd(), offset, into);
}

void Arena::write(uint64_t offset, std::span<const std::byte> bytes) {
  if (offset + bytes.size() <= view_.size() && has_pages(view_.subspan(offset, bytes.size()))) {
    std::memcpy(view_.data() + offset, bytes.data(), bytes.size());
  } else {
    write_file(file_.fd(), offset, bytes);
  }
}

void Arena::fill(uint64_t offset, uint64_t count) {
  static const std::vector<std::byte> zeros(1 << 20);
  for (uint64_t done = 0; done < count; done += zeros.size()) {
    const uint64_t piece = std::min<uint64_t>(zeros.size(), count - done);
    write_file(file_.fd(), offset + done, std::span(zeros).first(piece));
  }
}

void Arena::open_view(unsigned writers) {
  close_view();
  if (writers <= kFileWritersMax) return;
  const size_t count = bytes();
  void* const found = mmap(nullptr, count, PROT_READ | PROT_WRITE, MAP_SHARED, file_.fd(), 0);
  if (found != MAP_FAILED) view_ = {static_cast<std::byte*>(found), count};
}

void Arena::close_view() noexcept {
  if (!view_.empty()) munmap(view_.data(), view_.size());
  view_ = {};
}

bool Arena::map(uint64_t offset, std::span<std::byte> place, bool shared) const noexcept {
  return mmap(place.data(), place.size(), PROT_READ | PROT_WRITE,
              (shared ? MAP_SHARED : MAP_PRIVATE) | MAP_FIXED, file_.fd(),
              static_cast<off_t>(offset)) != MAP_FAILED;
}

void Arena::punch(uint64_t offset, uint64_t count) {
  if (fallocate(file_.fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                static_cast<off_t>(count)) != 0) {
    throw_errno("cannot give back memory of saved state");
  }
}

FreeRanges::FreeRanges(std::vector<Extent> used) {
  std::sort(used.begin(), used.end(),
            [](const Extent& a, const Extent& b) { return a.offset < b.offset; });
  for (const Extent& extent : used) {
    if (extent.offset > end_) gaps_.emplace(extent.offset - end_, end_);
    end_ = std::max(end_, extent.offset + whole_pages(extent.count));
  }
}

uint64_t FreeRanges::take(uint64_t count) {
  const uint64_t needed = whole_pages(count);
  const auto gap = gaps_.lower_bound(needed);
  if (gap == gaps_.end()) return std::exchange(end_, end_ + needed);
  const auto [room, offset] = *gap;
  gaps_.erase(gap);
  if (room > needed) gaps_.emplace(room - needed, offset + needed);
  return offset;
}

}  // namespace sing
