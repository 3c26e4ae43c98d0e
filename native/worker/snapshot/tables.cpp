#include "worker/snapshot/tables.h"

#include <sys/mman.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "oplog/mapping.h"
#include "worker/operators/origins.h"

namespace sing {

namespace {

constexpr uint64_t kHugeBytes = 2 << 20;

[[noreturn]] void refuse(const std::string& why) {
  throw std::runtime_error("the snapshot cannot be used: " + why);
}

void put_failure(Writer& out, const Failure& failure) {
  out.put(failure.kind);
  out.put<uint64_t>(failure.position);
  out.put_string(failure.operation);
  out.put_string(failure.message);
}

void put_generators(Writer& out, Generators& generators) {
  const auto numbers = generators.numbers();
  out.put<uint32_t>(static_cast<uint32_t>(numbers.size()));
  for (const uint32_t number : numbers) {
    const auto bytes = generators.state(number);
    out.put<uint32_t>(number);
    out.put<uint64_t>(generators.current_seed(number));
    out.put<uint32_t>(static_cast<uint32_t>(bytes.size()));
    out.put_bytes(bytes.data(), bytes.size());
  }
}

void put_storages(Writer& out, Storages& storages, Gather& small,
                  const std::function<void(uint32_t id, Slot& slot)>& place) {
  uint32_t count = 0;
  const size_t count_at = out.size();
  out.put<uint32_t>(0);
  std::vector<std::byte> bytes;
  for (uint32_t id = 0; id < storages.all().size(); ++id) {
    Slot& slot = storages.all()[id];
    if (slot.life == Slot::Life::none) continue;
    ++count;
    // How far it has been written, zeros included, decides when it becomes valid again.
    if (slot.life == Slot::Life::lost && slot.storage) storages.detach(slot);
    const uint64_t saved = saved_bytes(slot);
    out.put<uint32_t>(id);
    out.put(slot.life);
    out.put<uint8_t>(slot.in_memory());
    out.put<uint32_t>(slot.stale);
    out.put<uint64_t>(slot.bytes);
    out.put<uint64_t>(saved);
    out.put<uint64_t>(slot.used);
    if (slot.life == Slot::Life::lost) out.put_string(*slot.cause);
    if (saved >= kInlineBytes) {
      place(id, slot);
    } else if (saved != 0) {
      bytes.resize(saved);
      if (storages.device().is_cpu()) {
        Storages::read(slot, 0, bytes);
      } else {
        small.add(out.size(), slot.storage, saved);
      }
      out.put_bytes(bytes.data(), saved);
    }
  }
  out.patch<uint32_t>(count_at, count);
}

void load_operators(Reader& in, State& state) {
  const uint32_t count = in.get_count(8);
  if (count > Operators::kCountMax) refuse("too many operators");
  for (uint32_t number = 0; number < count && in.ok(); ++number) {
    std::string name(in.get_string());
    std::string overload(in.get_string());
    if (!name.empty()) state.operators.define(number, std::move(name), std::move(overload));
  }
}

void put_origins(Writer& out, const Operators& operators) {
  uint32_t count = 0;
  const size_t count_at = out.size();
  out.put<uint32_t>(0);
  for (uint32_t number = 0; number < operators.all().size(); ++number) {
    const Origin origin = origin_of(operators.all()[number].full_name);
    if (origin.empty()) continue;
    ++count;
    out.put<uint32_t>(number);
    put_origin(out, origin);
  }
  out.patch<uint32_t>(count_at, count);
}

// Imports the modules that define custom operators, which do not exist before.
void load_origins(Reader& in, State& state) {
  const uint32_t count = in.get_count(16);
  for (uint32_t i = 0; i < count && in.ok(); ++i) {
    const uint32_t number = in.get<uint32_t>();
    const Origin origin = get_origin(in);
    if (!in.ok() || number >= state.operators.all().size()) refuse("an impossible origin");
    const std::string name = state.operators.all()[number].name;
    const std::string overload = state.operators.all()[number].overload;
    if (name.empty()) refuse("an origin of no operator");
    if (!state.limits.allowed) import_origin(name, overload, origin);
    state.operators.define(number, name, overload);
  }
}

// The state of a generator is meaningless on a device of another kind; its seed is not.
void load_generators(Reader& in, State& state, bool same_kind) {
  const uint32_t count = in.get_count(16);
  for (uint32_t i = 0; i < count && in.ok(); ++i) {
    const uint32_t number = in.get<uint32_t>();
    const uint64_t seed = in.get<uint64_t>();
    const auto bytes = in.get_bytes(in.get<uint32_t>());
    if (!in.ok()) return;
    if (same_kind) {
      state.generators.set_state(number, bytes);
    } else {
      state.generators.seed(number, seed);
    }
  }
}

void load_settings(Reader& in, State& state) {
  state.settings.reset();
  if (in.get<uint8_t>() == 0) return;
  const Settings values = get_settings(in);
  if (!in.ok()) return;
  state.settings = values;
  apply_settings(values);
}

void load_rest(Reader& in, State& state) {
  const uint32_t events = in.get_count(12);
  if (events > State::kEventsMax) refuse("too many events");
  for (uint32_t i = 0; i < events && in.ok(); ++i) {
    const uint32_t number = in.get<uint32_t>();
    state.events[number] = Stamp{in.get<int64_t>(), {}, {}};
  }
  load_settings(in, state);
  state.failures = in.get<uint32_t>();
  if (in.get<uint8_t>() == 0) return;
  Failure failure;
  failure.kind = in.get<ErrorKind>();
  failure.position = in.get<uint64_t>();
  failure.operation = in.get_string();
  failure.message = in.get_string();
  if (failure.kind > ErrorKind::out_of_host_memory) refuse("an unknown kind of error");
  state.pending = std::move(failure);
}

// Fresh memory is faulted in page by page unless the system can use huge pages.
void advise_huge(const c10::Storage& storage) {
  if (storage.device().type() != c10::DeviceType::CPU) return;
  const auto data = reinterpret_cast<uintptr_t>(storage.data());
  const auto first = (data + kHugeBytes - 1) & ~(kHugeBytes - 1);
  const auto end = (data + storage.nbytes()) & ~(kHugeBytes - 1);
  if (end > first) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}

void check_extents(const std::vector<ExtentEntry>& extents, uint64_t arena_bytes,
                   uint64_t carried_bytes) {
  std::vector<ExtentEntry> sorted(extents);
  std::sort(sorted.begin(), sorted.end(), [](const ExtentEntry& a, const ExtentEntry& b) {
    return std::pair(a.carried, a.offset) < std::pair(b.carried, b.offset);
  });
  uint32_t carried = 0;
  uint64_t end = 0;
  for (const ExtentEntry& entry : sorted) {
    if (std::exchange(carried, entry.carried) != entry.carried) end = 0;
    const uint64_t bytes = entry.carried != 0 ? carried_bytes : arena_bytes;
    if (entry.offset % kPageBytes != 0 || entry.count < kInlineBytes || entry.carried > 1 ||
        entry.version == 0 || entry.offset < end || entry.offset > bytes ||
        entry.count > bytes - entry.offset) {
      refuse("an impossible extent");
    }
    end = entry.offset + entry.count;
  }
}

}  // namespace

DeviceKind kind_of(c10::Device device) {
  return device.type() == c10::DeviceType::CPU ? DeviceKind::software : DeviceKind::cuda;
}

uint64_t saved_bytes(const Slot& slot) {
  // Zeros that were filled in since it was saved need not be saved.
  return slot.saved ? slot.saved.count : slot.filled;
}

void put_tables(Writer& out, State& state, Gather& small,
                const std::function<void(uint32_t id, Slot& slot)>& place) {
  const auto& operators = state.operators.all();
  out.put<uint32_t>(static_cast<uint32_t>(operators.size()));
  for (const Operator& op : operators) {
    out.put_string(op.name);
    out.put_string(op.overload);
  }
  put_generators(out, state.generators);
  out.put<uint32_t>(static_cast<uint32_t>(state.events.size()));
  for (const auto& [number, stamp] : state.events) {
    out.put<uint32_t>(number);
    if (stamp.event) small.add(out.size(), stamp);
    out.put<int64_t>(stamp.ns);
  }
  out.put<uint8_t>(state.settings.has_value());
  if (state.settings) put_settings(out, *state.settings);
  out.put<uint32_t>(state.failures);
  out.put<uint8_t>(state.pending.has_value());
  if (state.pending) put_failure(out, *state.pending);
  put_storages(out, state.storages, small, place);
  put_origins(out, state.operators);
}

void load_tables(const Snapshot& snapshot, State& state, std::vector<Slot> old,
                 MovedContents* moved,
                 const std::function<TransferPtr(c10::Storage, Extent, uint64_t index)>& load) {
  Reader in(snapshot.tables);
  load_operators(in, state);
  load_generators(in, state,
                  snapshot.header.device_kind == static_cast<uint32_t>(kind_of(state.device)));
  load_rest(in, state);
  Storages& storages = state.storages;
  uint64_t index = 0;
  const uint32_t count = in.get_count(34);
  for (uint32_t i = 0; i < count && in.ok(); ++i) {
    const uint32_t id = in.get<uint32_t>();
    const auto life = in.get<Slot::Life>();
    const uint8_t in_memory = in.get<uint8_t>();
    const uint32_t stale = in.get<uint32_t>();
    const uint64_t bytes = in.get<uint64_t>();
    const uint64_t filled = in.get<uint64_t>();
    const uint64_t used = in.get<uint64_t>();
    const bool lost = life == Slot::Life::lost;
    std::string cause(lost ? in.get_string() : std::string_view());
    const auto data = in.get_bytes(filled < kInlineBytes ? filled : 0);
    if (!in.ok()) break;
    if (id >= Storages::kCountMax || bytes > Storages::kBytesMax || filled > bytes ||
        (life != Slot::Life::live && !lost) || in_memory > 1 || (filled != 0 && !in_memory) ||
        (id < storages.all().size() && storages.all()[id].life != Slot::Life::none)) {
      refuse("an impossible storage");
    }
    if (filled < kInlineBytes) {
      const bool placed = moved != nullptr && moved->place(storages, id, bytes, data, {}, false);
      if (!placed) storages.allocate(id, bytes);
      if (in_memory && !placed) {
        storages.write(storages.at(id), 0, data);
        storages.note_saved(storages.at(id), {0, filled, kInlineVersion}, nullptr);
      }
    } else {
      if (index == snapshot.extents.size() || snapshot.extents[index].id != id ||
          snapshot.extents[index].count != filled) {
        refuse("a storage without its extent");
      }
      const Extent extent = snapshot.extents[index].extent();
      const bool carried = snapshot.extents[index].carried != 0;
      if (moved != nullptr && moved->place(storages, id, bytes, {}, extent, carried)) {
        // It holds what others have here.
      } else if (moved != nullptr && carried) {
        storages.allocate(id, bytes);
        storages.restore_carried(storages.at(id), extent, moved->carried());
      } else if (id < old.size() && old[id].saved == extent && old[id].bytes == bytes) {
        storages.restore(id, std::move(old[id]));
      } else {
        storages.allocate(id, bytes);
        storages.restore(storages.at(id), extent, [&](c10::Storage storage, Extent where) {
          advise_huge(storage);
          return load(std::move(storage), where, index);
        });
      }
      ++index;
    }
    Slot& slot = storages.at(id);
    slot.life = life;
    if (lost) slot.cause = std::make_shared<const std::string>(std::move(cause));
    slot.stale = stale;
    slot.used = used;
    if (moved != nullptr && !lost) moved->name(slot, id);
  }
  if (in.ok()) load_origins(in, state);
  if (!in.ok() || in.remaining() != 0 || index != snapshot.extents.size()) {
    refuse("its tables cannot be read");
  }
}

Snapshot read_snapshot(int fd, uint64_t arena_bytes, uint64_t carried_bytes) {
  Snapshot snapshot;
  SnapshotHeader& header = snapshot.header;
  const uint64_t total = file_bytes(fd);
  if (total < sizeof(header)) refuse("it is torn");
  read_file(fd, 0, std::as_writable_bytes(std::span(&header, 1)));
  if (header.magic != kSnapshotMagic) refuse("it is none");
  if (header.version != kSnapshotVersion) {
    refuse("it has version " + std::to_string(header.version));
  }
  const uint64_t rest = total - sizeof(header);
  if (header.total_bytes != total || header.extents_offset != sizeof(header) ||
      header.extents_count > rest / sizeof(ExtentEntry) ||
      header.table_bytes != rest - header.extents_count * sizeof(ExtentEntry)) {
    refuse("it is torn");
  }
  snapshot.extents.resize(header.extents_count);
  read_file(fd, header.extents_offset, std::as_writable_bytes(std::span(snapshot.extents)));
  check_extents(snapshot.extents, arena_bytes, carried_bytes);
  snapshot.tables.resize(header.table_bytes);
  read_file(fd, total - header.table_bytes, snapshot.tables);
  return snapshot;
}

void complete(Snapshot& snapshot) noexcept {
  SnapshotHeader& header = snapshot.header;
  header.magic = kSnapshotMagic;
  header.version = kSnapshotVersion;
  header.extents_offset = sizeof(header);
  header.extents_count = snapshot.extents.size();
  header.table_bytes = snapshot.tables.size();
  header.state_bytes += snapshot.tables.size();
  header.total_bytes =
      sizeof(header) + snapshot.extents.size() * sizeof(ExtentEntry) + snapshot.tables.size();
}

int write_snapshot(const Snapshot& snapshot) {
  File file(memfd_create("sing-snapshot", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.fd() < 0) throw_errno("cannot make a snapshot");
  const auto extents = std::as_bytes(std::span(snapshot.extents));
  write_file(file.fd(), sizeof(SnapshotHeader), extents);
  write_file(file.fd(), sizeof(SnapshotHeader) + extents.size(), snapshot.tables);
  // The header last: a file without it is no snapshot.
  write_file(file.fd(), 0, std::as_bytes(std::span(&snapshot.header, 1)));
  return file.release();
}

}  // namespace sing
