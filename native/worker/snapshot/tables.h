// File of a snapshot: all device state of a session at one position of its log, except the bytes of
// storages, which lie in the arena, or in a file that is carried along (see Note [Moves]).
// docs/format.md describes it.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "oplog/codec.h"
#include "worker/snapshot/copy_stream.h"
#include "worker/snapshot/moved.h"
#include "worker/state/arena.h"
#include "worker/state/state.h"

namespace sing {

inline constexpr uint64_t kSnapshotMagic = 0x31504e53474e4953;  // "SINGSNP1"
inline constexpr uint32_t kSnapshotVersion = 3;
// Storages with fewer bytes are stored in the tables: an extent takes at least a page.
inline constexpr uint64_t kInlineBytes = 4096;
inline constexpr uint64_t kInlineVersion = 1;  // of Slot::saved, for these storages

struct SnapshotHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t device_kind;  // DeviceKind of the device on which it was written
  uint64_t position;
  uint64_t total_bytes;     // of this file
  uint64_t state_bytes;     // of all storages, as far as they are saved
  uint64_t extents_offset;  // in this file
  uint64_t extents_count;
  uint64_t table_bytes;  // the tables follow the extents
};
static_assert(sizeof(SnapshotHeader) == 64);

struct ExtentEntry {
  uint64_t offset;
  uint64_t count;
  uint32_t id;       // of its storage
  uint32_t carried;  // 1: it lies in the file that is carried along, not in the arena
  uint64_t version;

  Extent extent() const noexcept { return {offset, count, version}; }
};
static_assert(sizeof(ExtentEntry) == 32);

struct Snapshot {
  SnapshotHeader header{};
  std::vector<ExtentEntry> extents;
  std::vector<std::byte> tables;
};

// Reads the file and checks header and extents. Trusts nothing in it. `carried_bytes`: of the file
// that was carried along.
Snapshot read_snapshot(int fd, uint64_t arena_bytes, uint64_t carried_bytes = 0);
// Fills the header in, except position, device and the bytes of storages.
void complete(Snapshot& snapshot) noexcept;
// Writes it into a new memfd.
int write_snapshot(const Snapshot& snapshot);

DeviceKind kind_of(c10::Device device);

// Number of bytes of a storage that a snapshot holds: the bytes after them are zeros.
uint64_t saved_bytes(const Slot& slot);

// Writes the tables, while no record is executed. `place` is called once for each storage that lies
// in the arena, in the order of the extents. The bytes of the others that are on a device, and
// times that it has not reached yet, are added to `small`, and left open.
void put_tables(Writer& out, State& state, Gather& small,
                const std::function<void(uint32_t id, Slot& slot)>& place);

// Fills `state`, which has no storages, from the tables; `old` holds the storages of the earlier
// state. A storage whose extent is unchanged is taken from `old` and need not be loaded. `moved`:
// contents that came with the snapshot, or null.
void load_tables(const Snapshot& snapshot, State& state, std::vector<Slot> old,
                 MovedContents* moved,
                 const std::function<TransferPtr(c10::Storage, Extent, uint64_t index)>& load);

}  // namespace sing
