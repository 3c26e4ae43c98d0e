// The storages of a session: numbers that the client gave to bytes on the device.
//
// A storage takes device memory at its first use, not when it is allocated, and bytes that nobody
// wrote count as zeros, so that replaying a log gives the same bytes. Zeros are filled in only
// when somebody could see them: not before an operator that overwrites the whole storage.
#pragma once

#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "oplog/layout.h"
#include "worker/failures.h"

namespace at {
class Tensor;
}

namespace sing {

struct Slot {
  enum class Life : uint8_t { none = 0, live = 1, lost = 2 };
  Life life = Life::none;
  // The failure that skipped a write to this storage; see Note [Failures] in executor.h.
  uint32_t stale = 0;
  uint64_t bytes = 0;
  uint64_t filled = 0;   // bytes from the start that hold values; the others count as zeros
  uint64_t charged = 0;  // device memory taken
  c10::Storage storage;  // none before the first use
  std::shared_ptr<const std::string> cause;  // of the loss: the operator that failed

  bool in_memory() const { return static_cast<bool>(storage); }
};

class Storages {
 public:
  static constexpr uint32_t kCountMax = 1 << 24;
  static constexpr uint64_t kBytesMax = uint64_t{1} << 60;

  // `granted`: device bytes that the session may use (null: no limit).
  Storages(c10::Device device, const Word<uint64_t>* granted);

  // CorruptLog if nothing is there.
  Slot& at(uint32_t id);
  void allocate(uint32_t id, uint64_t bytes);
  void free(uint32_t id);
  void resize(uint32_t id, uint64_t bytes);
  // Takes over what an operator made. OutOfMemoryError leaves the number without a storage.
  void bind(uint32_t id, c10::Storage storage, uint64_t bytes);
  void lose(uint32_t id, std::shared_ptr<const std::string> cause, uint64_t bytes);
  // After an operator has changed the size of a storage itself. OutOfMemoryError if that went
  // beyond the grant; the storage stays as it is.
  void note_size(Slot& slot);

  // The storage with every byte defined, or (`raw`) about to be overwritten as a whole.
  const c10::Storage& use(Slot& slot);
  const c10::Storage& use_raw(Slot& slot);

  // After every byte of it was overwritten.
  static void revive(Slot& slot);

  void write(Slot& slot, uint64_t offset, std::span<const std::byte> bytes);
  // Needs use() before. Waits for the device.
  void read(const Slot& slot, uint64_t offset, std::span<std::byte> into) const;

  c10::Device device() const { return device_; }
  c10::Allocator* allocator() const { return allocator_; }
  uint64_t resident() const { return resident_; }
  const std::vector<Slot>& slots() const { return slots_; }
  // Replayed records ran within the grant of their time, which may be lower by now.
  void enforce(bool on) { enforced_ = on; }
  // For the loader of snapshots: takes memory for a storage whose first bytes the loader fills.
  std::byte* restore(uint32_t id, uint64_t filled);
  void restore_stale(uint32_t id, uint32_t failure) { at(id).stale = failure; }
  std::byte* host_data(uint32_t id);

 private:
  Slot& slot(uint32_t id);
  void charge(uint64_t bytes);
  void release(Slot& slot) noexcept;

  c10::Device device_;
  c10::Allocator* allocator_;
  const Word<uint64_t>* granted_;
  bool enforced_ = true;
  uint64_t resident_ = 0;
  std::vector<Slot> slots_;
};

// The bytes [offset, offset + count) of a storage as a tensor.
at::Tensor bytes_of(const c10::Storage& storage, uint64_t offset, uint64_t count);

}  // namespace sing
