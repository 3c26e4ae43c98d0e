// A session's memory: grants requested from the agent, and the storages that use it.
#include <memory>
#include <mutex>

#include "client/log/engagement.h"
#include "client/log/errors.h"
#include "client/log/session.h"
#include "client/log/waiting.h"

namespace sing::client {

namespace {

constexpr size_t kPendingEntriesMax = 4096;
constexpr size_t kSpareSlotsMax = 4096;
constexpr uint64_t kPendingFreeBytes = uint64_t{4} << 20;

}  // namespace

bool Session::want(uint64_t bytes) {
  flush_storages();
  const auto lock = lock_without_gil(want_mutex_);
  uint64_t sequence = 0;
  {
    const auto present = lock_present();
    ++engaged_;
    sequence = client_->want_sequence.load() + 1;
    client_->memory_wanted.store(bytes);
    client_->want_sequence.store(sequence, std::memory_order_seq_cst);
  }
  const Engagement engagement(*this);
  ring();
  try {
    wait_agent([&] { return agent_->grant_sequence.load(std::memory_order_seq_cst) >= sequence; });
  } catch (...) {
    // Interrupted: from now on the session needs no more than it has.
    client_->memory_wanted.store(client_->memory_used.load());
    ring();
    throw;
  }
  // A grant may be reduced again before it is used: the caller then requests it once more.
  return agent_->refused_sequence.load() != sequence;
}

bool Session::try_reserve(uint64_t more) {
  uint64_t wanted = 0;
  {
    const auto lock = lock_present();
    wanted = used_ + more;
    if (agent_->memory_granted.load() >= wanted) return true;
  }
  return want(wanted);
}

void Session::cover_use() {
  for (;;) {
    uint64_t used = 0;
    {
      const auto lock = lock_present();
      used = used_;
      if (agent_->memory_granted.load() >= used && most_ >= used) return;
    }
    if (used <= most_ && want(used)) continue;
    {
      std::lock_guard lock(mutex_);
      ++counters_.out_of_memory;
    }
    const uint64_t granted = std::min(used, agent_->memory_granted.load());
    refuse_memory(used - granted, granted);
  }
}

// The agent lowers a grant and then reads the memory in use; the client publishes the memory in use
// and then reads the grant. So one of the two notices the conflict.
bool Session::take_memory_locked(uint64_t wanted) noexcept {
  if (wanted > agent_->memory_granted.load(std::memory_order_relaxed)) return false;
  client_->memory_used.store(wanted, std::memory_order_seq_cst);
  if (wanted <= agent_->memory_granted.load(std::memory_order_seq_cst)) return true;
  client_->memory_used.store(used_, std::memory_order_seq_cst);
  return false;
}

// Small results come and go with every operator: their slots are reused.
std::unique_ptr<Slot> Session::take_slot_locked() {
  if (spare_slots_.empty()) return std::make_unique<Slot>();
  auto slot = std::move(spare_slots_.back());
  spare_slots_.pop_back();
  *slot = Slot{};  // captures may have left their marks
  return slot;
}

Slot* Session::allocate(uint64_t bytes, bool announced) {
  const uint64_t charged = charged_bytes(bytes);
  for (;;) {
    uint64_t wanted = 0;
    {
      const auto lock = lock_present();
      const bool kept = capturing();
      if (kept) {
        if (Slot* slot = take_idle_locked(bytes)) return slot;
      }
      wanted = used_ + charged;
      if (wanted > most_ && charged != 0) {
        ++counters_.out_of_memory;
        refuse_memory(bytes, used_);
      }
      if (charged == 0 || take_memory_locked(wanted)) {
        auto slot = take_slot_locked();
        slot->bytes = bytes;
        slot->charged = charged;
        slot->address = addresses_.take(bytes, slot->address_class);
        if (free_ids_.empty()) {
          slot->id = next_id_++;
        } else {
          slot->id = free_ids_.back();
          free_ids_.pop_back();
        }
        used_ = wanted;
        peak_ = std::max(peak_, used_);
        client_->memory_peak.store(peak_, std::memory_order_relaxed);
        ++counters_.allocations;
        counters_.bytes_allocated += charged;
        counters_.live_peak =
            std::max(counters_.live_peak, counters_.allocations - counters_.frees);
        if (kept) {
          slot->maker = capture_.load();
          pin_locked(*capture_.load(), slot.get());
        }
        if (announced || kept) {
          pending_.push_back({slot->id, static_cast<uint32_t>(StorageAction::allocate), bytes});
        }
        return slot.release();
      }
    }
    if (!want(wanted)) {
      std::unique_lock lock(mutex_);
      ++counters_.out_of_memory;
      lock.unlock();
      refuse_memory(bytes, wanted - charged);
    }
  }
}

void Session::refuse_memory(uint64_t bytes, uint64_t used) {
  std::string text = "Tried to allocate " + as_size(bytes) + ". ";
  if (const uint64_t quota = agent_->memory_quota.load()) {
    text += "Your quota of " + as_size(quota) + " on this machine does not allow that. ";
  } else {
    text += "GPU 0 has a total capacity of " + as_size(agent_->memory_total.load()) + " of which " +
            as_size(agent_->memory_free.load()) + " is free beyond what this kernel has. ";
  }
  text += "This kernel uses " + as_size(used) + ". ";
  if (most_ != UINT64_MAX) text += as_size(most_) + " allowed; ";
  raise_out_of_memory(text + "Delete tensors that are no longer needed and try again.");
}

void Session::limit_memory(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  most_ = bytes;
}

void Session::charge(Slot* slot, uint64_t bytes) {
  std::lock_guard lock(mutex_);
  resize_locked(slot, bytes);
}

void Session::resize_locked(Slot* slot, uint64_t bytes) {
  const uint64_t charged = charged_bytes(bytes);
  used_ = used_ - slot->charged + charged;
  counters_.bytes_allocated += charged;
  counters_.bytes_freed += slot->charged;
  peak_ = std::max(peak_, used_);
  client_->memory_used.store(used_, std::memory_order_relaxed);
  client_->memory_peak.store(peak_, std::memory_order_relaxed);
  addresses_.give(slot->address, slot->address_class);
  slot->bytes = bytes;
  slot->charged = charged;
  slot->address = addresses_.take(bytes, slot->address_class);
}

void Session::free(Slot* slot) noexcept {
  bool flush = false;
  {
    std::lock_guard lock(mutex_);
    if (outlive_locked(slot)) [[unlikely]]
      return;
    used_ -= slot->charged;
    counters_.bytes_freed += slot->charged;
    client_->memory_used.store(used_, std::memory_order_relaxed);
    addresses_.give(slot->address, slot->address_class);
    pending_.push_back({slot->id, static_cast<uint32_t>(StorageAction::free), 0});
    pending_bytes_ += slot->charged;
    ++counters_.frees;
    flush = pending_bytes_ > kPendingFreeBytes || pending_.size() > kPendingEntriesMax;
    std::unique_ptr<Slot> spare(slot);
    if (spare_slots_.size() < kSpareSlotsMax) spare_slots_.push_back(std::move(spare));
  }
  if (flush) flush_storages();
}

void Session::resize(Slot* slot, uint64_t bytes) {
  const uint64_t charged = charged_bytes(bytes);
  if (charged > slot->charged) {
    // Reserves by allocating the difference, so that running out of memory is handled in one place.
    Slot* more = allocate(charged - slot->charged, false);
    free(more);
  }
  Writer out;
  out.put<uint32_t>(slot->id);
  out.put<uint32_t>(0);
  out.put<uint64_t>(bytes);
  append(RecordKind::resize, out.view());
  std::lock_guard lock(mutex_);
  resize_locked(slot, bytes);
}

void Session::reset_peak() {
  std::lock_guard lock(mutex_);
  peak_ = used_;
  counters_.live_peak = counters_.allocations - counters_.frees;
  client_->memory_peak.store(peak_, std::memory_order_relaxed);
}

}  // namespace sing::client
