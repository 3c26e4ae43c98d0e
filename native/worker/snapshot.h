// Snapshots: everything that a session's numbers stand for at one position of its log.
// docs/format.md describes the file.
#pragma once

#include <cstdint>

#include "worker/state.h"

namespace sing {

inline constexpr uint64_t kSnapshotMagic = 0x31504e53474e4953;  // "SINGSNP1"
inline constexpr uint32_t kSnapshotVersion = 1;

struct SnapshotHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t device_kind;  // DeviceKind of the device that wrote it
  uint64_t position;
  uint64_t table_bytes;  // the tables follow the header
  uint64_t total_bytes;  // of the file
};
static_assert(sizeof(SnapshotHeader) == 40);

// An open file, closed at the end of its life.
class File {
 public:
  explicit File(int fd) noexcept : fd_(fd) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();
  int fd() const noexcept { return fd_; }
  int release() noexcept;

 private:
  int fd_;
};

// Writes `state` into a new memfd. Throws on failure.
int write_snapshot(State& state, uint64_t position, uint64_t& bytes);

// Fills a fresh state and returns its position. Nothing in the file is trusted.
uint64_t load_snapshot(int fd, State& state);

}  // namespace sing
