// Memory of storages that is mapped from the arena instead of copied. No session in here.
//
// Note [Mapped]. On a software device, device memory and arena are both host memory: a storage that
// is loaded need not be copied as long as it is only read. Its extent is mapped at its address,
// privately, and before its bytes change it takes memory of its own at the same address. Until then
// every snapshot names that extent again, so it is neither given back nor written.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "worker/state/arena.h"

namespace sing {

// Memory for `bytes` that begin with those of an extent; the bytes behind them count for nothing.
// None if the process has as many mappings as it may: then they must be copied.
std::optional<c10::DataPtr> map_extent(const Arena& arena, const Extent& extent, uint64_t bytes);

// Whether the bytes of a storage are still those of the arena.
bool is_mapped(const c10::Storage& storage) noexcept;
// Before they change. std::bad_alloc. Other threads may read the storage meanwhile.
void own(const c10::Storage& storage);
// Makes reading them cost no page faults.
void populate(std::span<std::byte> mapped) noexcept;

}  // namespace sing
