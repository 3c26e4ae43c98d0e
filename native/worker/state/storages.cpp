#include "worker/state/storages.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>

#include <cstring>

#include "worker/state/mapped.h"

namespace sing {

namespace {

// Above this size, bytes go to a device through pinned memory: otherwise the driver waits for the
// device's queued work and copies piece by piece. Smaller data travels inside the command.
constexpr uint64_t kStagedBytes = 32 << 10;
// Size of the pieces in which data is read from the device.
constexpr uint64_t kStagedPieceBytes = 4 << 20;
constexpr uint64_t kPlainCopyBytes = 256 << 10;  // above, torch's threads help

bool is_host(c10::Device device) { return device.type() == c10::DeviceType::CPU; }

at::Tensor host_bytes(const void* data, uint64_t count) {
  return at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(count)}, at::kByte);
}

void zero(const c10::Storage& storage, uint64_t offset, uint64_t count) {
  if (count == 0) return;
  if (is_host(storage.device()) && count <= kPlainCopyBytes) {
    std::memset(static_cast<std::byte*>(storage.mutable_data()) + offset, 0, count);
  } else {
    bytes_of(storage, offset, count).zero_();
  }
}

}  // namespace

at::Tensor bytes_of(const c10::Storage& storage, uint64_t offset, uint64_t count) {
  const auto key = c10::computeDispatchKey(at::kByte, c10::kStrided, storage.device());
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), caffe2::TypeMeta::Make<uint8_t>());
  const int64_t size = static_cast<int64_t>(count), stride = 1;
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
      c10::IntArrayRef(size), c10::IntArrayRef(stride), static_cast<int64_t>(offset));
  return tensor;
}

c10::Storage fresh_storage(c10::Allocator* allocator, uint64_t bytes) {
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, allocator->allocate(bytes), allocator,
                      /*resizable=*/true);
}

Storages::Storages(c10::Device device, const Word<uint64_t>* granted, Replicas* replicas,
                   bool check_splicing)
    : device_(device),
      allocator_(is_host(device) ? c10::GetCPUAllocator() : c10::GetAllocator(device.type())),
      granted_(granted),
      replicas_(is_host(device) ? replicas : nullptr),
      session_(replicas_ ? replicas_->join() : 0),
      check_splicing_(check_splicing) {}

Storages::~Storages() {
  if (replicas_) replicas_->leave(session_);
  held_.clear();
  slots_.clear();
  // What others share; another worker of the session may overwrite the arena from now on.
  if (mapped_) mapped_->own_all();
}

Slot& Storages::at(uint32_t id) {
  if (id >= slots_.size() || slots_[id].life == Slot::Life::none) {
    throw CorruptLog("storage " + std::to_string(id) + " does not exist");
  }
  return slots_[id];
}

Slot& Storages::slot(uint32_t id) {
  if (id >= kCountMax) throw CorruptLog("storage " + std::to_string(id) + " is out of range");
  if (id >= slots_.size()) slots_.resize(id + 1);
  return slots_[id];
}

void copy_in(const c10::Storage& storage, uint64_t offset, std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  if (is_host(storage.device())) {
    std::memcpy(static_cast<std::byte*>(storage.mutable_data()) + offset, bytes.data(),
                bytes.size());
    return;
  }
  // The main thread does not wait for the device here, so that it stays ahead of it. The allocator
  // of pinned memory knows when the copy is done.
  at::Tensor host = host_bytes(bytes.data(), bytes.size());
  if (bytes.size() > kStagedBytes) {
    host = pinned_bytes(bytes.size());
    std::memcpy(host.mutable_data_ptr(), bytes.data(), bytes.size());
  }
  bytes_of(storage, offset, bytes.size()).copy_(host, /*non_blocking=*/true);
}

void copy_out(const c10::Storage& storage, uint64_t offset, std::span<std::byte> into) {
  if (into.empty()) return;
  if (is_host(storage.device())) {
    std::memcpy(into.data(), static_cast<const std::byte*>(storage.data()) + offset, into.size());
    return;
  }
  if (into.size() <= kStagedBytes) {
    host_bytes(into.data(), into.size()).copy_(bytes_of(storage, offset, into.size()));
    return;
  }
  const at::Tensor staging = pinned_bytes(std::min(into.size(), kStagedPieceBytes));
  for (uint64_t at = 0; at < into.size(); at += kStagedPieceBytes) {
    const uint64_t count = std::min(into.size() - at, kStagedPieceBytes);
    staging.narrow(0, 0, static_cast<int64_t>(count)).copy_(bytes_of(storage, offset + at, count));
    std::memcpy(into.data() + at, staging.const_data_ptr(), count);
  }
}

void copy_bytes(const c10::Storage& from, const c10::Storage& to) {
  const uint64_t bytes = from.nbytes();
  if (bytes == 0) return;
  if (bytes <= kPlainCopyBytes) {
    std::memcpy(to.mutable_data(), from.data(), bytes);
  } else {
    bytes_of(to, 0, bytes).copy_(bytes_of(from, 0, bytes));
  }
}

at::Tensor pinned_bytes(uint64_t count) {
  return at::empty({static_cast<int64_t>(count)},
                   at::TensorOptions().dtype(at::kByte).pinned_memory(true));
}

std::span<std::byte> span_of(const at::Tensor& bytes) {
  return {static_cast<std::byte*>(bytes.mutable_data_ptr()), bytes.nbytes()};
}

// ---------------------------------------------------------------- accounts

void Storages::charge(uint64_t bytes) {
  const uint64_t granted = this->granted();
  const auto fits = [&] {
    const uint64_t counted = resident_ - std::min(resident_, overdrawn_);
    return !enforced_ || bytes <= granted - std::min(granted, counted);
  };
  for (; !fits() && !held_.empty(); sweep()) {
    held_.front().transfer->owner.settle(held_.front().transfer);
  }
  const bool beyond = lenient_ && !fits();
  if (!beyond && !fits()) {
    throw BeyondGrant({__func__, __FILE__, __LINE__},
                      c10::str("out of device memory: tried to allocate ", bytes, " bytes; ",
                               resident_, " of ", granted, " granted bytes are in use"));
  }
  resident_ += bytes;
  if (beyond) overdrawn_ = resident_ - granted;
}

void Storages::sweep() noexcept {
  std::erase_if(held_, [this](const Held& held) {
    if (!held.transfer->finished()) return false;
    resident_ -= held.charged;
    return true;
  });
}

void Storages::release(Slot& slot) noexcept {
  forget_saved(slot);
  // The next rank would take as much besides; its step waits for what it changes, too.
  if (replicas_ && slot.charged >= kLargeBytes) finish_saving(slot);
  if (slot.transfer && !slot.transfer->finished()) {
    if (slot.storage || slot.rewrite) {
      held_.push_back(
          {std::move(slot.transfer), slot.charged, std::move(slot.share), std::move(slot.rewrite)});
      slot.charged = 0;
    } else {
      slot.transfer->owner.drop(slot.transfer);
    }
  }
  resident_ -= slot.charged;
  slot = Slot();
}

void Storages::note_saved(Slot& slot, Extent extent, TransferPtr transfer) {
  slot.saved = extent;
  slot.transfer = std::move(transfer);
  saved_ += slot.charged;
}

void Storages::forget_saved(Slot& slot) noexcept {
  if (!slot.saved) return;
  slot.saved = Extent();
  saved_ -= slot.charged;
}

void Storages::detach(Slot& slot) {
  own(slot.storage);
  forget_saved(slot);
}

void Storages::await_saved(Slot& slot) {
  slot.transfer->owner.settle_for_kernels(slot.transfer);
  if (slot.transfer->finished()) slot.transfer.reset();
}

void Storages::await_loaded(Slot& slot) {
  slot.transfer->owner.settle(slot.transfer);
  slot.storage = std::move(slot.transfer->storage);
  slot.transfer.reset();
}

// ---------------------------------------------------------------- what records do

void Storages::allocate(uint32_t id, uint64_t bytes) {
  if (bytes > kBytesMax) throw CorruptLog("a storage of impossible size");
  Slot& fresh = slot(id);
  release(fresh);
  fresh.life = Slot::Life::live;
  fresh.bytes = bytes;
  if (replicas_) fresh.content = ContentId::zeros(bytes);
}

void Storages::free(uint32_t id) {
  if (id < slots_.size()) release(slots_[id]);
}

const c10::Storage& Storages::use_raw(Slot& slot) {
  slot.used = position_;
  if (slot.storage) return slot.storage;
  if (slot.rewrite) {
    finish(slot);
  } else if (slot.transfer) {
    await_loaded(slot);
  } else if (slot.postponed) {
    compute(slot);
  } else {
    take_memory(slot);
  }
  return slot.storage;
}

void Storages::take_memory(Slot& slot, std::optional<c10::DataPtr> memory) {
  charge(slot.bytes);
  try {
    slot.storage = c10::Storage(c10::Storage::use_byte_size_t(), slot.bytes,
                                memory ? *std::move(memory) : allocator_->allocate(slot.bytes),
                                allocator_, /*resizable=*/true);
  } catch (...) {
    resident_ -= slot.bytes;
    throw;
  }
  slot.charged = slot.bytes;
  slot.given_up = false;
}

const c10::Storage& Storages::use(Slot& slot) {
  use_raw(slot);
  if (slot.filled < slot.bytes) {
    zero(slot.storage, slot.filled, slot.bytes - slot.filled);
    slot.filled = slot.bytes;
  }
  return slot.storage;
}

void Storages::resize(uint32_t id, uint64_t bytes) {
  if (bytes > kBytesMax) throw CorruptLog("a storage of impossible size");
  Slot& old = at(id);
  // An operator that failed may have taken memory for it, of the old size.
  if (old.life == Slot::Life::lost) return lose(id, old.cause, bytes);
  if (!old.in_memory()) {
    old.bytes = bytes;
    old.filled = std::min(old.filled, bytes);
    if (replicas_) old.content = ContentId::zeros(bytes);
    return;
  }
  use_raw(old);
  touch(old);
  Slot fresh;
  fresh.life = Slot::Life::live;
  fresh.stale = old.stale;
  fresh.bytes = bytes;
  // Old and new exist at once only here; the client, too, counts a storage only once.
  resident_ -= old.charged;
  try {
    use_raw(fresh);
  } catch (...) {
    resident_ += old.charged;
    throw;
  }
  fresh.changed = old.changed;
  fresh.changes = old.changes;
  fresh.filled = std::min(old.filled, bytes);
  if (fresh.filled != 0) {
    bytes_of(fresh.storage, 0, fresh.filled).copy_(bytes_of(old.storage, 0, fresh.filled));
  }
  old = std::move(fresh);
}

void Storages::bind(uint32_t id, c10::Storage storage, uint64_t bytes) {
  Slot& fresh = slot(id);
  release(fresh);
  charge(storage.nbytes());
  fresh.charged = storage.nbytes();
  fresh.life = Slot::Life::live;
  fresh.bytes = bytes;
  fresh.filled = bytes;
  fresh.storage = std::move(storage);
  fresh.used = fresh.changed = position_;
}

void Storages::lose(uint32_t id, std::shared_ptr<const std::string> cause, uint64_t bytes) {
  Slot& lost = slot(id);
  release(lost);
  lost.life = Slot::Life::lost;
  lost.bytes = bytes;
  lost.cause = std::move(cause);
}

void Storages::vacate(uint32_t id) {
  static const auto cause = std::make_shared<const std::string>("a collective without a wait");
  const Slot& slot = at(id);
  if (replicas_ && slot.life == Slot::Life::live) lose(id, cause, slot.bytes);
}

void Storages::note_size(Slot& slot) {
  const uint64_t bytes = slot.storage.nbytes();
  if (bytes == slot.charged) return;
  resident_ -= slot.charged;
  slot.charged = bytes;
  try {
    charge(bytes);
  } catch (...) {
    // The client does not receive the new size: for the client, and when it retries, the old one is
    // valid.
    resident_ += bytes;
    throw;
  }
  slot.bytes = slot.filled = bytes;
}

void Storages::write(Slot& slot, uint64_t offset, std::span<const std::byte> bytes,
                     const ContentName& name) {
  if (replicas_) [[unlikely]]
    return write_in_seat(slot, offset, bytes, name);
  // A lost storage is valid again once it was written from the first byte to the last.
  if (slot.life == Slot::Life::lost && offset > slot.filled) return;
  if (offset > slot.filled) {
    use(slot);
  } else {
    use_raw(slot);  // uploads come in pieces, from the start: no zeros needed before them
  }
  touch(slot);
  copy_in(slot.storage, offset, bytes);
  slot.filled = std::max(slot.filled, offset + bytes.size());
  if (slot.filled == slot.bytes) revive(slot);
}

void Storages::revive(Slot& slot) {
  slot.life = Slot::Life::live;
  slot.filled = slot.bytes;
  slot.stale = 0;
  slot.cause.reset();
}

// ---------------------------------------------------------------- loading

void Storages::restore(Slot& slot, Extent extent, const Loading& load) {
  const bool mapped = arena_ && extent.count >= mapped_bytes_min_;
  take_memory(slot, mapped ? map_extent(*arena_, extent, slot.bytes) : std::nullopt);
  slot.filled = extent.count;
  c10::Storage storage;
  std::swap(storage, slot.storage);
  note_saved(slot, extent, load(std::move(storage), extent));
  slot.content = {};
  slot.findable = true;
}

void Storages::restore_carried(Slot& slot, const Extent& extent, const Arena& file) {
  const bool taken = extent.count >= mapped_bytes_min_;
  auto memory = taken ? take_extent(file, extent, slot.bytes) : std::nullopt;
  const bool copied = !memory;
  take_memory(slot, std::move(memory));
  if (copied) {
    file.read(extent.offset, {static_cast<std::byte*>(slot.storage.mutable_data()), extent.count});
  }
  slot.filled = extent.count;
  slot.content = {};
  slot.findable = true;
}

void Storages::restore(uint32_t id, Slot&& slot) {
  Slot& place = this->slot(id);
  release(place);
  place = std::move(slot);
  resident_ += place.charged;
  if (place.saved) saved_ += place.charged;
}

std::vector<Slot> Storages::take_all() {
  resident_ = saved_ = 0;
  return std::exchange(slots_, {});
}

}  // namespace sing
