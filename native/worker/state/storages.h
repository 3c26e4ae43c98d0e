// The storages of a session: numbers that the client gave to bytes on the device.
//
// A storage takes device memory at its first use, not when it is allocated. Bytes that were never
// written count as zeros, so that replaying a log gives the same bytes. Zeros are filled in only
// when they could be read: not before an operator that overwrites the whole storage.
#pragma once

#include <c10/core/Storage.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "oplog/layout.h"
#include "worker/exec/failures.h"
#include "worker/replicas/replicas.h"
#include "worker/replicas/rewrite.h"
#include "worker/snapshot/rhythm.h"
#include "worker/snapshot/transfers.h"

namespace at {
class Tensor;
}

namespace sing {

class Postponed;

// The bytes [offset, offset + count) of a storage as a tensor.
at::Tensor bytes_of(const c10::Storage& storage, uint64_t offset, uint64_t count);

// Copies between a storage and host memory; done when they return.
void copy_in(const c10::Storage& storage, uint64_t offset, std::span<const std::byte> bytes);
void copy_out(const c10::Storage& storage, uint64_t offset, std::span<std::byte> into);
// Allocates host memory that the device can access directly, without the CPU (pinned memory).
at::Tensor pinned_bytes(uint64_t count);
std::span<std::byte> span_of(const at::Tensor& bytes);
// Takes memory that no session counts; its bytes are undefined.
c10::Storage fresh_storage(c10::Allocator* allocator, uint64_t bytes);
// Copies all bytes between two storages of one size on a software device.
void copy_bytes(const c10::Storage& from, const c10::Storage& to);

struct Slot {
  enum class Life : uint8_t { none = 0, live = 1, lost = 2 };
  Life life = Life::none;
  // The failure that skipped a write to this storage; see Note [Failures] in executor.h.
  uint32_t stale = 0;
  uint64_t bytes = 0;
  uint64_t filled = 0;   // bytes from the start that hold values; the others count as zeros
  uint64_t charged = 0;  // device memory taken
  c10::Storage storage;  // none before the first use
  std::shared_ptr<const std::string> cause;  // if lost: the operator that failed
  Extent saved;                              // where its bytes lie in the arena, until they change
  // Without a storage: the transfer that loads it. With one, or with a rewrite that is an upload:
  // the transfer that saves it, unless finished.
  TransferPtr transfer;
  uint64_t used = 0;     // position of the record that used it last
  uint64_t changed = 0;  // position of the record that changed it last
  uint32_t changes = 0;
  // In a seat: see Note [Replicas].
  ContentId content;      // of its bytes; none: unknown
  Share share;            // its part of the version that it owns
  uint64_t uploaded = 0;  // bytes from the start that were written one piece after the other
  ContentId uploading;    // what it then has, if that has a name
  bool findable = false;  // unknown, but worth finding from the bytes: they were saved
  uint64_t call = 0;      // the last call with this operand, counted
  uint32_t place = 0;     // of its first operand in that call
  // Without a storage: the call that is to make it, see Note [Postponed], and the number of what
  // it makes.
  std::shared_ptr<Postponed> postponed;
  uint32_t made = 0;
  // Without a storage: see Note [Rewrites] in rewrite.h.
  std::shared_ptr<Rewrite> rewrite;
  // Without a storage: its bytes, which were no zeros, are overwritten before they are used.
  bool given_up = false;

  // True if it takes device memory; its bytes may still be in transfer, or to be computed.
  bool in_memory() const { return storage || transfer || postponed || rewrite; }
  // Where the current call finds its bytes.
  const c10::Storage& held() const { return rewrite ? rewrite->storage() : storage; }
  // True if it has nothing but what it has uploaded so far: a snapshot can save that as it is.
  bool only_uploads() const { return rewrite && rewrite->upload() && life == Life::lost; }
};

class Storages {
 public:
  static constexpr uint32_t kCountMax = 1 << 24;
  static constexpr uint64_t kBytesMax = uint64_t{1} << 60;
  // Copying smaller ones takes no noticeable time.
  static constexpr uint64_t kLargeBytes = 64 << 10;

  // `granted`: device bytes that the session may use (null: no limit). `replicas`: of the seat
  // (null: none); `check_splicing`: see Limits.
  Storages(c10::Device device, const Word<uint64_t>* granted, Replicas* replicas = nullptr,
           bool check_splicing = false);
  ~Storages();
  Storages(const Storages&) = delete;
  Storages& operator=(const Storages&) = delete;

  // Throws CorruptLog if there is no such storage.
  Slot& at(uint32_t id);
  void allocate(uint32_t id, uint64_t bytes);
  void free(uint32_t id);
  void resize(uint32_t id, uint64_t bytes);
  // Takes ownership of an operator's result. If it throws OutOfMemoryError, the number has no
  // storage.
  void bind(uint32_t id, c10::Storage storage, uint64_t bytes);
  void lose(uint32_t id, std::shared_ptr<const std::string> cause, uint64_t bytes);
  // In a seat: gives up the memory of bytes that nothing uses until they are overwritten.
  void vacate(uint32_t id);
  // To be called after an operator has resized a storage itself. Throws OutOfMemoryError if that
  // went beyond the grant; the storage stays as it is.
  void note_size(Slot& slot);

  // Returns the storage with every byte defined, or (`raw`) about to be overwritten as a whole.
  const c10::Storage& use(Slot& slot);
  const c10::Storage& use_raw(Slot& slot);

  // To be called after use() and before the bytes change: a save in progress is completed first.
  void touch(Slot& slot) {
    if (slot.saved) detach(slot);
    slot.changed = position_;
    if (++slot.changes > 1 && slot.charged >= kLargeBytes) rhythm_.changed_again();
    if (slot.transfer) await_saved(slot);
    if (replicas_) [[unlikely]]
      forget_content(slot);
  }
  // Its bytes no longer equal those of its extent, or are about to change.
  void detach(Slot& slot);
  void begin_record(uint64_t position) noexcept {
    position_ = position;
    rhythm_.record();
  }
  // The rhythm in which storages change.
  Rhythm& rhythm() noexcept { return rhythm_; }

  // To be called after every byte of it was overwritten.
  static void revive(Slot& slot);

  // `name`: of the whole storage, when all pieces are written; none: empty.
  void write(Slot& slot, uint64_t offset, std::span<const std::byte> bytes,
             const ContentName& name = {});
  // Requires use() before. Waits for the device.
  static void read(const Slot& slot, uint64_t offset, std::span<std::byte> into) {
    copy_out(slot.held(), offset, into);
  }

  c10::Device device() const { return device_; }
  c10::Allocator* allocator() const { return allocator_; }
  uint64_t resident() const { return resident_; }
  // Bytes of the storages that have changed since they were saved.
  uint64_t dirty() const { return resident_ - saved_; }
  const std::vector<Slot>& slots() const { return slots_; }
  // Switches enforcement of the grant. Replayed records ran within the grant of their time, which
  // may be lower by now.
  bool enforced() const noexcept { return enforced_; }
  void enforce(bool on) {
    if (on && !enforced_) overdrawn_ = resident_ - std::min(resident_, granted());
    enforced_ = on;
  }
  // Note [Overdraft]: the result of a request may have a size that its client learns only from the
  // answer. By then it takes memory, and a failure would not undo the operator's other effects. So
  // one request may exceed the grant, and no other may until the client has been granted that much.
  void allow_overdraft(bool request) noexcept {
    if (overdrawn_ != 0 && resident_ <= granted()) overdrawn_ = 0;
    lenient_ = request && overdrawn_ == 0;
  }
  // Frees the memory of freed storages whose save is finished.
  void sweep() noexcept;
  bool holds_freed() const noexcept { return !held_.empty(); }

  // --- in a seat, see Note [Replicas]; defined in worker/replicas/contents.cpp ---
  Replicas* replicas() const noexcept { return replicas_; }
  uint32_t session() const noexcept { return session_; }
  // Returns the content; finds it from the bytes if it is unknown and that is worth it.
  const ContentId& content(Slot& slot);
  // The same for all large ones, before anything is executed: others may have the same bytes.
  void find_contents();
  // Makes versions of what was loaded and has a content.
  void enter_contents();
  // Returns when the bytes may be changed by others, as no snapshot saves them any more.
  void finish_saving(Slot& slot) {
    if (slot.transfer && slot.storage) await_saved(slot);
  }
  // Before the bytes of an operand change: they are no version any more. Its storage may be another
  // one afterwards.
  void prepare_change(Slot& slot);
  // Before a part of the bytes is overwritten without being read: returns true if only that part of
  // held() may be used, and is to be noted afterwards. Else the bytes are to be changed as usual.
  bool begin_part(Slot& slot);
  // Before that: others that own the version may give it up.
  using Asks = std::function<void(const ContentId& version)>;
  void ask_owners(Asks asks) { ask_owners_ = std::move(asks); }
  // The storage that owns the version and can give it up; none: 0 bytes.
  struct Owner {
    uint32_t id = 0;
    uint64_t bytes = 0;
  };
  Owner owner_of(const ContentId& version) const;
  // The storage gives up its bytes, as the next records overwrite them: see Note [Ahead] in
  // ahead.h.
  void give_up(uint32_t id);
  void note_part(Slot& slot, uint64_t offset, uint64_t count);
  // To be called after the bytes were changed: what they are. They become a version, or their
  // storage is replaced by that of the version that exists.
  // `of_bytes`: the id is the hash of the bytes.
  void note_content(Slot& slot, const ContentId& id, bool of_bytes = false);
  // To be called when the bytes are read as a whole: others may upload them.
  void note_read(Slot& slot, const ContentName& name);
  // Makes the slot an owner of a version, as if its bytes had been changed to these.
  void splice(Slot& slot, Share share);
  // The same for a new number. Throws as bind() does.
  void bind(uint32_t id, Share share);
  // The same with what a postponed call makes, and its content.
  void postpone(Slot& slot, std::shared_ptr<Postponed> call, uint32_t made, const ContentId& id);
  void bind_postponed(uint32_t id, uint64_t bytes, std::shared_ptr<Postponed> call, uint32_t made,
                      const ContentId& content);
  // Executes all postponed calls of which something is left, and finishes all rewrites, or leaves
  // those of uploads, in which other sessions take part: all, or what a snapshot can save.
  enum class Leave : uint8_t { nothing, saveable, uploads };
  void settle(Leave leave = Leave::nothing);
  // True if there is something to settle, apart from uploads.
  bool unsettled() const noexcept;
  // Bytes that it does not share with other sessions.
  uint64_t unshared() const;
  // Throws WrongSplice if the bytes differ from those of a version's storage, or of a piece of it
  // that begins there.
  void check_splice(const c10::Storage& storage, std::span<const std::byte> bytes,
                    const std::string& operation, std::optional<uint64_t> piece = {}) const;
  bool checks_splicing() const noexcept { return check_splicing_; }

  // --- for snapshots, while no record is executed ---
  std::vector<Slot>& all() { return slots_; }
  void note_saved(Slot& slot, Extent extent, TransferPtr transfer);
  void forget_saved(Slot& slot) noexcept;
  // On a software device: storages are mapped from the arena rather than loaded, see mapped.h.
  // Smaller ones are copied: mappings are limited, and one costs more than a small copy.
  void map_from(const Arena* arena, uint64_t bytes_min) {
    arena_ = arena;
    mapped_ = arena->mapped();
    mapped_bytes_min_ = bytes_min;
  }
  // Takes memory for a live storage without any, to be loaded from `extent` by the transfer that
  // `load` makes.
  using Loading = std::function<TransferPtr(c10::Storage, Extent)>;
  void restore(Slot& slot, Extent extent, const Loading& load);
  // The same with the bytes of a file that nothing else needs.
  void restore_carried(Slot& slot, const Extent& extent, const Arena& file);
  // Puts in an unchanged storage of the earlier state: see `take_all`.
  void restore(uint32_t id, Slot&& slot);
  // Removes all storages and returns them; they no longer count as used memory.
  std::vector<Slot> take_all();

 private:
  // The storage of a freed slot, until it is saved.
  struct Held {
    TransferPtr transfer;
    uint64_t charged;
    Share share;
    std::shared_ptr<Rewrite> upload;
  };

  uint64_t granted() const noexcept {
    return granted_ ? granted_->load(std::memory_order_relaxed) : UINT64_MAX;
  }
  Slot& slot(uint32_t id);
  void charge(uint64_t bytes);
  void take_memory(Slot& slot, std::optional<c10::DataPtr> memory = std::nullopt);
  void await_loaded(Slot& slot);
  void await_saved(Slot& slot);
  void release(Slot& slot) noexcept;
  void forget_content(Slot& slot);
  void own_alone(Slot& slot, bool copied);
  void replace(Slot& slot);
  void compute(Slot& slot);
  void finish(Slot& slot);
  void leave_upload(Slot& slot);
  bool fit(Slot& slot);
  void write_in_seat(Slot& slot, uint64_t offset, std::span<const std::byte> bytes,
                     const ContentName& name);
  bool find_named(Slot& slot, uint64_t offset, std::span<const std::byte> bytes,
                  const ContentId& named);
  void begin_upload(Slot& slot, const ContentId& named);
  void complete_upload(Slot& slot, Upload& upload);
  void write_piece(Slot& slot, uint64_t offset, std::span<const std::byte> bytes,
                   const ContentId& named);
  static ContentId id_of(const ContentName& name, const Slot& slot) noexcept;

  c10::Device device_;
  c10::Allocator* allocator_;
  const Arena* arena_ = nullptr;
  std::shared_ptr<MappedExtents> mapped_;  // of the arena
  uint64_t mapped_bytes_min_ = 0;
  const Word<uint64_t>* granted_;
  Replicas* replicas_;
  const uint32_t session_;  // its number in the seat
  const bool check_splicing_;
  bool unsettled_ = false;  // some slots may be postponed, or be rewritten
  bool enforced_ = true;
  bool lenient_ = false;    // see Note [Overdraft]
  uint64_t overdrawn_ = 0;  // bytes beyond the grant
  uint64_t resident_ = 0;
  uint64_t saved_ = 0;  // of resident_, charged to storages whose bytes the arena has
  uint64_t position_ = 0;
  Rhythm rhythm_;
  std::vector<Held> held_;
  std::vector<Slot> slots_;
  Asks ask_owners_;
};

}  // namespace sing
