// Memory of storages that is mapped from the arena instead of copied. Independent of sessions.
//
// Note [Mapped]. On a software device, device memory and arena are both host memory: a storage that
// is loaded need not be copied as long as it is only read. Its extent is mapped at its address,
// privately, and before its bytes change it takes memory of its own at the same address. Until then
// the extent is in use: it is neither freed nor written.
//
// What a session carries to another process (see Note [Moves]) lies in a file that nothing else
// needs. Such an extent is the memory of its storage from then on, and never copied.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_set>
#include <vector>

#include "worker/state/arena.h"

namespace sing {

struct MappedMemory;

// The memory that is mapped from an arena, of any session. From any thread.
class MappedExtents {
 public:
  void add(MappedMemory& memory);
  // The memory ends.
  void remove(MappedMemory& memory) noexcept;
  // Gives it memory of its own, unless that is done already. Throws std::bad_alloc.
  void own(MappedMemory& memory);
  void own_all();
  std::vector<Extent> list() const;

 private:
  mutable std::mutex mutex_;
  std::unordered_set<MappedMemory*> all_;
};

// Returns memory for `bytes` that begins with the bytes of an extent; the bytes after them are
// unspecified. None if the process has reached its limit of mappings: then they must be copied.
std::optional<c10::DataPtr> map_extent(const Arena& arena, const Extent& extent, uint64_t bytes);

// The same for an extent that becomes the memory itself, and is freed with it.
std::optional<c10::DataPtr> take_extent(const Arena& file, const Extent& extent, uint64_t bytes);

// True if the bytes of a storage are still mapped from the arena.
bool is_mapped(const c10::Storage& storage) noexcept;
// Gives a storage memory of its own before its bytes change. Throws std::bad_alloc. Other threads
// may read the storage meanwhile.
void own(const c10::Storage& storage);
// Faults the pages in, so that reading them costs no page faults.
void populate(std::span<std::byte> mapped) noexcept;

}  // namespace sing
