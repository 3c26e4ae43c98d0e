#include "worker/snapshot/snapshot.h"

#include <c10/core/DeviceGuard.h>
#include <sys/resource.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_set>

#include "worker/loop/clock.h"
#include "worker/snapshot/copy_stream.h"
#include "worker/state/mapped.h"

namespace sing {

namespace {

constexpr unsigned kThreadsMax = 8;
// Storages up to this size are loaded first: many operators need only these.
constexpr uint64_t kSmallBytes = 1 << 20;
constexpr int kFillingNice = 10;
// After so many bytes, taking memory in advance can end.
constexpr uint64_t kPieceBytes = 4 << 20;
// Number of bits for versions that one worker may give to extents; those of the next worker are
// higher.
constexpr int kVersionBits = 40;

// Closes the arena's view, if there is one, at the end.
struct ArenaView {
  explicit ArenaView(Arena& arena) : arena(arena) {}
  ArenaView(const ArenaView&) = delete;
  ArenaView& operator=(const ArenaView&) = delete;
  ~ArenaView() { arena.close_view(); }
  Arena& arena;
};

}  // namespace

// A snapshot that is being made.
struct Snapshots::Making {
  explicit Making(FreeRanges free) : free(std::move(free)) {}

  struct Save {
    uint32_t id;
    TransferPtr transfer;
    // Position of its last change: tells how soon its bytes may change again.
    uint64_t changed;
  };

  FreeRanges free;
  Snapshot snapshot;
  std::vector<Save> saves;
  std::vector<uint32_t> inlined;
  Gather small;
  uint64_t copied = 0;

  // Storages that change in every step come first, those unchanged for longest before the others:
  // they change next. Then the newest, which are likely to be freed soon.
  std::vector<TransferPtr> order() {
    std::sort(saves.begin(), saves.end(), [](const Save& a, const Save& b) {
      const bool soon = a.transfer->soon;
      if (soon != b.transfer->soon) return soon;
      return soon ? a.changed < b.changed : a.changed > b.changed;
    });
    std::vector<TransferPtr> order;
    order.reserve(saves.size());
    for (const Save& save : saves) order.push_back(save.transfer);
    return order;
  }
};

Snapshots::Kept Snapshots::Kept::of(const Snapshot& snapshot) {
  Kept kept{snapshot.header.position, {}};
  kept.extents.reserve(snapshot.extents.size());
  for (const ExtentEntry& entry : snapshot.extents) {
    if (entry.carried == 0) kept.extents.push_back(entry.extent());
  }
  return kept;
}

Snapshots::Snapshots(State& state, int arena_fd, const AgentPage& agent, Orders& orders,
                     uint64_t epoch)
    : state_(state),
      arena_(arena_fd),
      agent_(agent),
      orders_(orders),
      version_(epoch << kVersionBits),
      loads_(Transfers::Direction::load, arena_, state.device, state.limits.piece_bytes),
      saves_(Transfers::Direction::save, arena_, state.device, state.limits.piece_bytes) {
  if (state.device.type() == c10::DeviceType::CPU) {
    state.storages.map_from(&arena_, state.limits.mapped_bytes);
  }
}

unsigned Snapshots::threads() const {
  // This holds for a device, too: its copies share one stream, but meanwhile threads read or write
  // the arena.
  return std::clamp(std::thread::hardware_concurrency(), 1u, kThreadsMax);
}

// ---------------------------------------------------------------- loading

uint64_t Snapshots::open(int tables_fd, int readiness_fd) {
  const Snapshot snapshot = read_snapshot(tables_fd, arena_.bytes());
  if (readiness_fd >= 0) {
    readiness_ = std::make_unique<Readiness>(readiness_fd, snapshot.extents.size());
    loads_.wait_for(readiness_.get());
  }
  return fill(snapshot, {}, nullptr);
}

uint64_t Snapshots::open_moved(int tables_fd, int contents_fd, int carried_fd, int base_fd) {
  Storages& storages = state_.storages;
  if (!storages.replicas()) throw std::runtime_error("a session alone shares nothing");
  const Arena carried(carried_fd);
  const Snapshot snapshot = read_snapshot(tables_fd, arena_.bytes(), carried.bytes());
  MovedContents moved(contents_fd, carried, *storages.replicas(), storages.session(),
                      state_.limits.check_splicing ? &arena_ : nullptr);
  moved_ = true;
  const uint64_t position = fill(snapshot, {}, &moved);
  if (base_fd >= 0) {
    kept_.insert(kept_.begin(), Kept::of(read_snapshot(base_fd, arena_.bytes())));
  }
  return position;
}

uint64_t Snapshots::adopt(int tables_fd) {
  const Snapshot snapshot = read_snapshot(tables_fd, arena_.bytes());
  loads_.wait_for(nullptr);
  readiness_.reset();
  moved_ = false;
  state_.operators.clear();
  state_.generators = Generators(state_.device);
  state_.events.clear();
  state_.pending.reset();
  return fill(snapshot, state_.storages.take_all(), nullptr);
}

uint64_t Snapshots::fill(const Snapshot& snapshot, std::vector<Slot> old, MovedContents* moved) {
  struct Load {
    TransferPtr transfer;
    uint64_t used;
  };
  std::vector<Load> loads;
  state_.storages.enforce(false);  // the snapshot's contents were granted when it was made
  load_tables(snapshot, state_, std::move(old), moved,
              [&](c10::Storage storage, Extent extent, uint64_t index) {
                TransferPtr transfer = loads_.add(std::move(storage), extent);
                transfer->index = index;
                loads.push_back({transfer, 0});
                return transfer;
              });
  state_.storages.enforce(true);
  if (!loads.empty()) loads_.begin();
  for (Load& load : loads) {
    load.used = state_.storages.at(snapshot.extents[load.transfer->index].id).used;
  }
  std::sort(loads.begin(), loads.end(), [](const Load& a, const Load& b) {
    const bool small_a = a.transfer->extent.count <= kSmallBytes;
    const bool small_b = b.transfer->extent.count <= kSmallBytes;
    return small_a != small_b ? small_a : a.used > b.used;
  });
  std::vector<TransferPtr> order;
  order.reserve(loads.size());
  for (Load& load : loads) order.push_back(std::move(load.transfer));
  kept_.assign(1, Kept::of(snapshot));
  loads_.schedule(std::move(order));
  loads_.help(threads(), Transfers::Pace::full);
  return snapshot.header.position;
}

// ---------------------------------------------------------------- the arena

void Snapshots::give_up_older() {
  // The agent may still be filling the extents of the first one.
  if (readiness_ && !readiness_->complete()) return;
  const uint64_t retained = agent_.retained.load(std::memory_order_acquire);
  // The agent may discard the log without a new snapshot, but storages unchanged since the newest
  // snapshot lie in the extents of that one.
  while (kept_.size() > 1 && kept_.front().position < retained) kept_.erase(kept_.begin());
}

FreeRanges Snapshots::free_ranges() const {
  std::vector<Extent> used;
  for (const Kept& kept : kept_) used.insert(used.end(), kept.extents.begin(), kept.extents.end());
  const std::vector<Extent> mapped = arena_.mapped()->list();
  used.insert(used.end(), mapped.begin(), mapped.end());
  return FreeRanges(std::move(used));
}

void Snapshots::give_back(const FreeRanges& free) {
  for (const auto& [count, offset] : free.gaps()) arena_.punch(offset, count);
  const uint64_t bytes = arena_.bytes();
  if (bytes > free.end()) arena_.punch(free.end(), bytes - free.end());
}

void Snapshots::forget_preallocated() noexcept {
  preallocated_until_ns_ = 0;
  preallocated_.reset();
}

void Snapshots::trim() {
  forget_preallocated();
  give_up_older();
  give_back(free_ranges());
}

void Snapshots::preallocate() {
  hurried_ = false;
  preallocated_until_ns_ = monotonic_ns() + state_.limits.preallocated_ns;
  give_up_older();
  const bool moves = state_.storages.replicas() != nullptr;
  std::optional<Arena> carried;
  if (moves) carried.emplace(preallocated_.emplace(carried_file()).fd());
  Arena& file = moves ? *carried : arena_;
  FreeRanges free = moves ? FreeRanges({}) : free_ranges();
  take_memory(file, free, unsaved([](const Slot&) { return true; }), UINT64_MAX);
  hurried_ = false;
}

// Returns the sizes of the storages that a snapshot would copy, of those that are `wanted`.
std::vector<uint64_t> Snapshots::unsaved(bool (*wanted)(const Slot&)) {
  std::vector<uint64_t> found;
  orders_.while_parked([&] {
    for (const Slot& slot : state_.storages.slots()) {
      if (!slot.saved && saved_bytes(slot) >= kInlineBytes && wanted(slot)) {
        found.push_back(slot.filled);
      }
    }
  });
  return found;
}

// Note [Fresh memory]. The system clears memory before a process gets it, and the host of a virtual
// machine may have to find it first: that takes many times as long as copying into it. The program
// waits for the copy of a storage that it is about to change. So the memory for that is taken
// before the snapshot begins. Training changes the same storages in each step, so their sizes are
// known from the snapshot before: the main thread need not be parked to find them.
void Snapshots::take_memory(Arena& file, FreeRanges free, const std::vector<uint64_t>& sizes,
                            uint64_t most) {
  std::vector<Extent> needed;
  for (const uint64_t size : sizes) {
    if (size > most) break;
    most -= size;
    needed.push_back({free.take(size), size, 0});
  }
  if (needed.empty()) return;
  file.grow(free.end());
  std::exception_ptr failure;
  std::thread([&] {
    // Compute threads and clients need the cores first. In Linux this is for the calling thread.
    setpriority(PRIO_PROCESS, 0, kFillingNice);
    try {
      for (const Extent& extent : needed) {
        for (uint64_t done = 0; done < extent.count; done += kPieceBytes) {
          if (hurried_ || orders_.ended()) return;
          file.fill(extent.offset + done, std::min(kPieceBytes, extent.count - done));
        }
      }
    } catch (...) {
      failure = std::current_exception();
    }
  }).join();
  if (failure) std::rethrow_exception(failure);
}

// ---------------------------------------------------------------- taking

void Snapshots::hurry() {
  hurried_ = true;
  state_.storages.rhythm().ring();
  saves_.help(threads(), Transfers::Pace::full);
}

void Snapshots::drop() {
  if (patient_) {
    dropped_ = true;
    saves_.cancel();
  }
  hurry();
}

void Snapshots::await_moment(const WorkerPage& page) {
  uint64_t seen = UINT64_MAX;
  state_.storages.rhythm().await_burst([&] {
    // A worker that has slept since the last check executes nothing that a copy could disturb.
    const uint64_t consumed = page.consumed.load(std::memory_order_relaxed);
    const bool still = page.asleep.load(std::memory_order_relaxed) != 0 ||
                       page.gate_open.load(std::memory_order_relaxed) == 0;
    const bool rests = consumed == seen && still;
    seen = consumed;
    return rests || hurried_ || orders_.ended();
  });
}

Taken Snapshots::take(Manner manner, const uint64_t& position, WorkerPage& page,
                      const std::function<void()>& frozen) {
  const bool stop = manner == Manner::stop;
  struct Patient {
    explicit Patient(std::atomic<bool>& flag, bool patient) : flag(flag) { flag = patient; }
    ~Patient() { flag = false; }
    std::atomic<bool>& flag;
  } patient(patient_, manner == Manner::patient);
  const c10::DeviceGuard device(state_.device);  // this thread's current one may be another
  loads_.await_arrivals();  // the snapshot must not refer to bytes that may never arrive
  give_up_older();
  // On a device, the program does not wait for the arena.
  uint64_t filling = 0;
  if (!stop && state_.device.is_cpu()) {
    const uint64_t began = monotonic_ns();
    if (changing_.empty()) {
      changing_ = unsaved([](const Slot& slot) { return slot.changes > 1; });
    }
    take_memory(arena_, free_ranges(), changing_, page.dirty_bytes.load(std::memory_order_relaxed));
    filling = monotonic_ns() - began;
  }
  if (manner == Manner::patient) {
    await_moment(page);
    if (dropped_.exchange(false)) {
      hurried_ = false;
      throw std::runtime_error("it is not needed any more");
    }
  }
  const uint64_t began = monotonic_ns() - filling, settling = saves_.settling_ns();
  const ArenaView view(arena_);
  Making making(free_ranges());
  Taken taken;
  uint64_t parked = 0;
  DeviceTime* const time = state_.time && !stop ? &*state_.time : nullptr;
  try {
    orders_.while_parked([&] {
      const uint64_t parked_at = monotonic_ns();
      if (time) time->freeze();
      making.snapshot.header.position = position;
      freeze(making);
      // Beside the execution of a software device, one thread saves.
      const unsigned writers = stop || !state_.device.is_cpu() ? threads() : 1;
      if (!making.saves.empty()) arena_.open_view(writers);
      state_.exactness.note_snapshot(position, agent_.retained.load(), page);
      if (stop) {
        saves_.schedule(making.order());
        saves_.help(threads(), Transfers::Pace::full);
        saves_.finish();
      }
      page.dirty_bytes.store(state_.storages.dirty(), std::memory_order_relaxed);
      parked = monotonic_ns() - parked_at;
    });
    if (frozen) frozen();
    if (!stop) {
      saves_.schedule(making.order());
      if (hurried_) {
        hurry();
      } else {
        // Copies of a device take no time of its kernels, and their threads no core of them.
        saves_.help(state_.device.is_cpu() ? 1 : threads(), Transfers::Pace::gentle);
      }
      saves_.finish();
      orders_.wake();  // to free what was held for this snapshot
    }
    hurried_ = dropped_ = false;
    making.small.fill(making.snapshot.tables);
    if (time) {
      orders_.await_resumed();
      taken.stalled_ns = time->take_lost_ns() + saves_.take_lost_ns();
    } else {
      taken.stalled_ns = parked + saves_.settling_ns() - settling;
    }
    taken.fd = write_snapshot(making.snapshot);
  } catch (...) {
    hurried_ = dropped_ = false;
    saves_.give_up();
    orders_.while_parked([&] {
      undo(making);
      saves_.reset();
      page.dirty_bytes.store(state_.storages.dirty(), std::memory_order_relaxed);
    });
    throw;
  }
  kept_.push_back(Kept::of(making.snapshot));
  changing_.clear();
  for (const Making::Save& save : making.saves) {
    if (save.transfer->soon) changing_.push_back(save.transfer->extent.count);
  }
  // A stop for a snapshot is urgent: trim later.
  if (stop) {
    forget_preallocated();
  } else if (monotonic_ns() >= preallocated_until_ns_) {
    forget_preallocated();
    give_back(making.free);
  }
  taken.position = making.snapshot.header.position;
  taken.bytes = making.snapshot.header.state_bytes;
  taken.copied = making.copied;
  taken.duration_ns = monotonic_ns() - began;
  page.stalled_ns.store(page.stalled_ns.load(std::memory_order_relaxed) + taken.stalled_ns,
                        std::memory_order_relaxed);
  return taken;
}

// Writes the tables and marks what is to be copied. The main thread is parked.
void Snapshots::freeze(Making& making) {
  if (orders_.ended()) throw std::runtime_error("the worker ends");
  Snapshot& snapshot = making.snapshot;
  SnapshotHeader& header = snapshot.header;
  Writer tables;
  put_tables(tables, state_, making.small, [&](uint32_t id, Slot& slot) {
    header.state_bytes += saved_bytes(slot);
    Extent extent = slot.saved;
    if (!extent) {
      extent = {making.free.take(slot.filled), slot.filled, ++version_};
      save(making, id, slot, extent);
    }
    snapshot.extents.push_back({extent.offset, extent.count, id, 0, extent.version});
  });
  if (!making.saves.empty()) saves_.begin();
  making.small.start(state_.device);
  arena_.grow(making.free.end());
  for (uint32_t id = 0; id < state_.storages.all().size(); ++id) {
    Slot& slot = state_.storages.all()[id];
    if (saved_bytes(slot) >= kInlineBytes) continue;
    if (!slot.storage || slot.saved) continue;
    state_.storages.note_saved(slot, {0, slot.filled, kInlineVersion}, nullptr);
    making.inlined.push_back(id);
  }
  snapshot.tables.assign(tables.view().begin(), tables.view().end());
  header.device_kind = static_cast<uint32_t>(kind_of(state_.device));
  complete(snapshot);
}

void Snapshots::save(Making& making, uint32_t id, Slot& slot, Extent extent) {
  TransferPtr transfer = saves_.add(slot.held(), extent);
  transfer->soon = slot.changes > 1;
  making.saves.push_back({id, transfer, slot.changed});
  making.copied += extent.count;
  if (slot.only_uploads()) {
    slot.transfer = std::move(transfer);  // the next snapshot saves more of it
  } else {
    state_.storages.note_saved(slot, extent, std::move(transfer));
  }
}

// Reverts the marks: a snapshot that was not finished has saved nothing. The main thread is parked.
void Snapshots::undo(const Making& making) noexcept {
  auto& slots = state_.storages.all();
  for (const Making::Save& save : making.saves) {
    saves_.drop(save.transfer);
    if (save.id >= slots.size()) continue;
    Slot& slot = slots[save.id];
    if (slot.saved == save.transfer->extent) state_.storages.forget_saved(slot);
    if (slot.transfer == save.transfer) slot.transfer.reset();
  }
  for (const uint32_t id : making.inlined) {
    if (id < slots.size() && slots[id].saved.version == kInlineVersion) {
      state_.storages.forget_saved(slots[id]);
    }
  }
}

void Snapshots::abort() noexcept {
  saves_.cancel();
  loads_.cancel();
}

}  // namespace sing
