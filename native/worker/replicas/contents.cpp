// What the storages of a session hold together with others: members of Storages.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "worker/replicas/postponed.h"
#include "worker/state/mapped.h"
#include "worker/state/storages.h"

namespace sing {

namespace {

std::span<const std::byte> span_of(const c10::Storage& storage) {
  return {static_cast<const std::byte*>(storage.data()), storage.nbytes()};
}

}  // namespace

const ContentId& Storages::content(Slot& slot) {
  if (!slot.content && slot.findable) {
    use(slot);
    note_content(slot, replicas_->hash(span_of(slot.storage)), /*of_bytes=*/true);
  }
  return slot.content;
}

void Storages::find_contents() {
  if (!replicas_ || !replicas_->has_others()) return;
  std::vector<Slot*> found;
  std::vector<std::span<const std::byte>> bytes;
  std::set<uint64_t> sizes;
  for (Slot& slot : slots_) {
    if (slot.life != Slot::Life::live || slot.content || !slot.findable ||
        slot.bytes < kLargeBytes) {
      continue;
    }
    const uint64_t used = slot.used;
    use(slot);
    slot.used = used;
    found.push_back(&slot);
    bytes.push_back(span_of(slot.storage));
    sizes.insert(slot.bytes);
  }
  const std::vector<ContentId> ids = replicas_->hash_all(bytes);
  replicas_->hash_versions(sizes, session_);
  for (size_t i = 0; i < found.size(); ++i) note_content(*found[i], ids[i], /*of_bytes=*/true);
}

void Storages::enter_contents() {
  for (Slot& slot : slots_) {
    if (!(slot.storage || slot.transfer) || !slot.content || slot.share) continue;
    const uint64_t used = slot.used;
    use(slot);
    slot.used = used;
    note_content(slot, ContentId(slot.content));
  }
}

void Storages::prepare_change(Slot& slot) {
  if (slot.postponed || slot.rewrite) use_raw(slot);
  if (slot.share) own_alone(slot, /*copied=*/true);
}

bool Storages::begin_part(Slot& slot) {
  if (slot.rewrite && slot.rewrite->upload()) leave_upload(slot);
  if (!slot.rewrite) {
    if (slot.life != Slot::Life::live) return false;
    if (slot.given_up) {
      take_memory(slot);
      slot.filled = slot.bytes;
      slot.given_up = false;
      slot.rewrite = std::make_shared<Rewrite>(Share(), std::move(slot.storage));
    } else {
      if (!slot.share) return false;
      // A snapshot may be saving the version, which its next owner could change.
      if (slot.transfer) await_saved(slot);
      if (slot.share.leave_if_alone()) return false;
      if (ask_owners_ && slot.bytes >= kLargeBytes) {
        ask_owners_(slot.share.id());
        if (slot.share.leave_if_alone()) return false;
      }
      c10::Storage fresh = fresh_storage(allocator_, slot.bytes);
      forget_saved(slot);
      slot.rewrite = std::make_shared<Rewrite>(std::move(slot.share), std::move(fresh));
    }
    slot.storage = {};
    unsettled_ = true;
  }
  slot.used = position_;
  touch(slot);
  return true;
}

Storages::Owner Storages::owner_of(const ContentId& version) const {
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (!slot.share || slot.share.id() != version) continue;
    if (slot.life != Slot::Life::live || slot.stale != 0) return {};
    return {static_cast<uint32_t>(i), slot.bytes};
  }
  return {};
}

void Storages::give_up(uint32_t id) {
  allocate(id, slots_[id].bytes);
  slots_[id].given_up = true;
  replicas_->count_given_up();
}

// Returns true if an operator has resized the memory of a rewrite, which is an error: no memory is
// counted for that, so it is given back.
bool Storages::fit(Slot& slot) {
  if (slot.rewrite->storage().nbytes() == slot.bytes) return false;
  slot.rewrite->move_to(fresh_storage(allocator_, slot.bytes));
  return true;
}

void Storages::note_part(Slot& slot, uint64_t offset, uint64_t count) {
  if (fit(slot)) return;
  slot.rewrite->note_overwritten(offset, count);
  if (!slot.rewrite->complete()) return;
  slot.storage = slot.rewrite->storage();
  slot.rewrite.reset();
}

void Storages::leave_upload(Slot& slot) {
  if (slot.transfer) await_saved(slot);  // others may change it from then on
  slot.rewrite->leave_upload(fresh_storage(allocator_, slot.bytes));
}

void Storages::finish(Slot& slot) {
  if (slot.rewrite->upload()) leave_upload(slot);
  fit(slot);
  slot.rewrite->finish();
  slot.storage = slot.rewrite->storage();
  slot.rewrite.reset();
  if (slot.content) note_content(slot, ContentId(slot.content));
}

void Storages::forget_content(Slot& slot) {
  slot.content = {};
  slot.uploaded = 0;
  slot.findable = false;
  if (slot.share) own_alone(slot, /*copied=*/true);
  // It may be mapped from the arena of another session, which copies it when it ends.
  own(slot.storage);
}

// Here is decided what happens when an owner changes bytes that others still need: it takes memory
// of its own. Until the others have changed theirs, too, both versions exist.
void Storages::own_alone(Slot& slot, bool copied) {
  // A snapshot may be saving the version, which its next owner could change.
  if (slot.transfer) await_saved(slot);
  if (slot.share.leave_if_alone()) return;
  c10::Storage fresh = fresh_storage(allocator_, slot.bytes);
  if (copied) copy_bytes(slot.storage, fresh);
  slot.storage = std::move(fresh);
  slot.share.reset();
}

void Storages::note_content(Slot& slot, const ContentId& id, bool of_bytes) {
  slot.content = id;
  slot.findable = false;
  if (slot.bytes == 0 || !slot.storage || slot.filled < slot.bytes ||
      slot.storage.nbytes() != slot.bytes) {
    return;
  }
  slot.share = replicas_->enter(slot.content, session_, slot.storage, of_bytes);
  if (!slot.share) return;
  if (slot.storage.is_alias_of(slot.share.storage())) return;
  check_splice(slot.share.storage(), span_of(slot.storage), "a result");
  slot.storage = slot.share.storage();
}

ContentId Storages::id_of(const ContentName& name, const Slot& slot) noexcept {
  return name ? hash({name.high, name.low, slot.bytes}, Hashed::name) : ContentId();
}

void Storages::note_read(Slot& slot, const ContentName& name) {
  if (!replicas_ || slot.bytes == 0 || slot.life != Slot::Life::live) return;
  use(slot);
  if (slot.storage.nbytes() != slot.bytes || is_mapped(slot.storage)) return;
  if (!slot.share && slot.content) note_content(slot, ContentId(slot.content));
  if (!name && (slot.share ? replicas_->is_hashed(slot.share) : static_cast<bool>(slot.content))) {
    return;
  }
  const ContentId id = name ? id_of(name, slot) : replicas_->hash(span_of(slot.storage));
  if (slot.share) {
    replicas_->also(slot.share, id, /*of_bytes=*/!name);
  } else if (!slot.content) {
    note_content(slot, id, /*of_bytes=*/!name);
  }
  if (name) slot.content = id;
}

// Ends what the slot has, before it gets other bytes. It is charged then.
void Storages::replace(Slot& slot) {
  slot.used = slot.changed = position_;
  if (slot.transfer && (slot.storage || slot.rewrite)) {
    await_saved(slot);
  } else if (slot.transfer) {
    slot.transfer->owner.drop(slot.transfer);  // need not be loaded any more
  } else if (!slot.in_memory()) {
    charge(slot.bytes);
    slot.charged = slot.bytes;
  }
  slot.transfer.reset();
  forget_saved(slot);
  if (++slot.changes > 1 && slot.charged >= kLargeBytes) rhythm_.changed_again();
  slot.storage = {};
  slot.share.reset();
  slot.postponed.reset();
  slot.rewrite.reset();
  slot.given_up = false;
  slot.uploaded = 0;
  slot.findable = false;
  revive(slot);
}

void Storages::splice(Slot& slot, Share share) {
  replace(slot);
  slot.storage = share.storage();
  slot.content = share.id();
  slot.share = std::move(share);
}

void Storages::postpone(Slot& slot, std::shared_ptr<Postponed> call, uint32_t made,
                        const ContentId& id) {
  replace(slot);
  slot.content = id;
  slot.postponed = std::move(call);
  slot.made = made;
  unsettled_ = true;
}

void Storages::bind_postponed(uint32_t id, uint64_t bytes, std::shared_ptr<Postponed> call,
                              uint32_t made, const ContentId& content) {
  allocate(id, bytes);
  postpone(slots_[id], std::move(call), made, content);
  slots_[id].changes = 0;
}

void Storages::compute(Slot& slot) {
  slot.storage = slot.postponed->take(slot.made);
  slot.postponed.reset();
  note_content(slot, ContentId(slot.content));
}

void Storages::settle(Leave leave) {
  if (!unsettled_) return;
  bool left = false;
  for (Slot& slot : slots_) {
    if (slot.postponed) compute(slot);
    if (!slot.rewrite) continue;
    if ((leave == Leave::uploads && slot.rewrite->upload()) ||
        (leave == Leave::saveable && slot.only_uploads())) {
      left = true;
    } else {
      finish(slot);
    }
  }
  unsettled_ = left;
}

bool Storages::unsettled() const noexcept {
  return unsettled_ && std::ranges::any_of(slots_, [](const Slot& slot) {
           return slot.postponed || (slot.rewrite && !slot.rewrite->upload());
         });
}

uint64_t Storages::unshared() const {
  return resident_ - std::min(resident_, replicas_ ? replicas_->shared(session_) : 0);
}

void Storages::bind(uint32_t id, Share share) {
  bind(id, share.storage(), share.storage().nbytes());
  slots_[id].content = share.id();
  slots_[id].share = std::move(share);
}

void Storages::write_in_seat(Slot& slot, uint64_t offset, std::span<const std::byte> bytes,
                             const ContentName& name) {
  if (slot.life == Slot::Life::lost && offset > slot.filled) return;
  const ContentId named = id_of(name, slot);
  if (named && find_named(slot, offset, bytes, named)) return;
  if (offset != 0 || bytes.size() != slot.bytes || bytes.empty()) {
    return write_piece(slot, offset, bytes, named);
  }
  ContentId id = named ? named : replicas_->hash(bytes);
  if (Share share = named ? Share() : replicas_->find(id, session_)) {
    check_splice(share.storage(), bytes, "a copy to the device");
    replicas_->count_upload();
    return splice(slot, std::move(share));
  }
  if (slot.postponed || slot.rewrite) {
    replace(slot);
    slot.storage = fresh_storage(allocator_, slot.bytes);
  }
  use_raw(slot);
  if (slot.share) own_alone(slot, /*copied=*/false);
  touch(slot);
  copy_in(slot.storage, 0, bytes);
  revive(slot);
  note_content(slot, id, /*of_bytes=*/!named);
  if (named) slot.content = named;
}

// Returns true if the storage has these bytes now, as those with its name are known.
bool Storages::find_named(Slot& slot, uint64_t offset, std::span<const std::byte> bytes,
                          const ContentId& named) {
  if (offset != 0) {  // a later piece
    if (!slot.share || slot.uploading != named || slot.uploaded != slot.bytes) return false;
  } else {
    ContentId id = named;
    Share share = replicas_->find(id, session_);
    if (!share) return false;
    replicas_->count_upload();
    splice(slot, std::move(share));
    slot.content = named;
    slot.uploading = named;
    slot.uploaded = slot.bytes;
  }
  check_splice(slot.share.storage(), bytes, "a copy to the device", offset);
  return true;
}

// See Note [Shared uploads] in upload.h.
void Storages::begin_upload(Slot& slot, const ContentId& named) {
  if (slot.rewrite || slot.bytes < kLargeBytes) return;
  const bool without_memory = !slot.in_memory();
  if (!without_memory && !slot.share) return;
  Uploading uploading(replicas_->upload(named, allocator_, slot.bytes), session_);
  if (without_memory) {
    charge(slot.bytes);
    slot.charged = slot.bytes;
    slot.given_up = false;
    slot.filled = slot.life == Slot::Life::live ? slot.bytes : 0;
  } else {
    if (slot.transfer) await_saved(slot);
    if (slot.share.leave_if_alone()) return;
    forget_saved(slot);
    slot.storage = {};
  }
  slot.rewrite = std::make_shared<Rewrite>(std::move(slot.share), std::move(uploading));
  unsettled_ = true;
}

void Storages::complete_upload(Slot& slot, Upload& upload) {
  upload.keep();
  if (slot.share) return;
  // Another storage of the session owns the version, and may change it.
  if (slot.transfer) await_saved(slot);
  c10::Storage fresh = fresh_storage(allocator_, slot.bytes);
  copy_bytes(slot.storage, fresh);
  slot.storage = std::move(fresh);
}

void Storages::write_piece(Slot& slot, uint64_t offset, std::span<const std::byte> bytes,
                           const ContentId& named) {
  const ContentId before = slot.life == Slot::Life::lost ? ContentId() : slot.content;
  const bool follows = offset == 0 || offset == slot.uploaded;
  const uint64_t uploaded = follows ? offset + bytes.size() : 0;
  const ContentId uploading = offset == 0 || slot.uploading == named ? named : ContentId();
  if (offset == 0 && named) begin_upload(slot, named);
  std::shared_ptr<Upload> upload = slot.rewrite ? slot.rewrite->upload() : nullptr;
  if (upload && (!follows || upload->name() != uploading)) upload.reset();
  if (upload) {
    slot.used = position_;
    // A snapshot saves only what is before this piece.
    TransferPtr saves = std::move(slot.transfer);
    touch(slot);
    slot.transfer = std::move(saves);
    const uint64_t known = upload->put(offset, bytes);
    check_splice(upload->storage(), bytes.first(known), "a copy to the device", offset);
    note_part(slot, offset, bytes.size());
    if (slot.life == Slot::Life::lost) {
      slot.filled = std::max(slot.filled, offset + bytes.size());
      if (slot.filled == slot.bytes) revive(slot);
    }
  } else if (begin_part(slot)) {
    copy_in(slot.held(), offset, bytes);
    note_part(slot, offset, bytes.size());
  } else {
    if (offset > slot.filled) {
      use(slot);
    } else {
      use_raw(slot);
    }
    touch(slot);
    copy_in(slot.storage, offset, bytes);
    slot.filled = std::max(slot.filled, offset + bytes.size());
    if (slot.filled == slot.bytes) revive(slot);
  }
  slot.uploaded = uploaded;
  slot.uploading = uploading;
  if (uploaded == slot.bytes) {
    use(slot);
    note_content(slot, uploading ? uploading : replicas_->hash(span_of(slot.storage)),
                 /*of_bytes=*/!uploading);
    if (uploading) slot.content = uploading;
    if (upload) complete_upload(slot, *upload);
  } else if (before && !named && !bytes.empty()) {
    const ContentId part = replicas_->hash(bytes);
    note_content(slot, hash({before.high, before.low, offset, bytes.size(), part.high, part.low},
                            Hashed::part));
  }
}

void Storages::check_splice(const c10::Storage& storage, std::span<const std::byte> bytes,
                            const std::string& operation, std::optional<uint64_t> piece) const {
  if (!check_splicing_) return;
  auto held = span_of(storage);
  if (piece) held = held.subspan(*piece, bytes.size());
  if (held.size() == bytes.size() && std::memcmp(held.data(), bytes.data(), held.size()) == 0) {
    return;
  }
  throw WrongSplice("bytes that should be equal are not: " + operation + ", at position " +
                    std::to_string(position_));
}

}  // namespace sing
