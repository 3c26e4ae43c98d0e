#include "worker/snapshot.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <fstream>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "oplog/codec.h"
#include "oplog/mapping.h"

namespace sing {

namespace {

constexpr uint64_t kPieceBytes = 4 << 20;
constexpr uint64_t kLargeBytes = 64 << 10;  // from here on, data starts at a page of its own
constexpr uint64_t kHugeBytes = 2 << 20;
constexpr unsigned kThreadsMax = 4;

[[noreturn]] void refuse(const std::string& why) {
  throw std::runtime_error("the snapshot cannot be used: " + why);
}

// A stretch of a storage's bytes and its place in the file.
struct Piece {
  uint32_t id;
  uint64_t storage_offset;
  uint64_t file_offset;
  uint64_t count;
};

// Copies run at the speed of memory, of which one thread gets only a part.
void in_parallel(const std::vector<Piece>& pieces, bool host,
                 const std::function<void(const Piece&, std::vector<std::byte>&)>& copy) {
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    std::vector<std::byte> buffer;
    try {
      for (size_t i = next++; i < pieces.size(); i = next++) copy(pieces[i], buffer);
    } catch (...) {
      std::lock_guard lock(mutex);
      failure = std::current_exception();
    }
  };
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  const size_t threads = host ? std::min({size_t{cores}, size_t{kThreadsMax}, pieces.size()}) : 1;
  std::vector<std::thread> others;
  for (size_t i = 1; i < threads; ++i) others.emplace_back(work);
  work();
  for (std::thread& thread : others) thread.join();
  if (failure) std::rethrow_exception(failure);
}

void add_pieces(std::vector<Piece>& pieces, uint32_t id, uint64_t file_offset, uint64_t count) {
  for (uint64_t at = 0; at < count; at += kPieceBytes) {
    pieces.push_back({id, at, file_offset + at, std::min(kPieceBytes, count - at)});
  }
}

uint64_t place(uint64_t end, uint64_t count) {
  const uint64_t alignment = count >= kLargeBytes ? kPageBytes : 64;
  return (end + alignment - 1) / alignment * alignment;
}

bool saved(const Slot& slot) { return slot.life == Slot::Life::live && slot.filled != 0; }

void put_failure(Writer& out, const Failure& failure) {
  out.put(failure.kind);
  out.put<uint64_t>(failure.position);
  out.put_string(failure.operation);
  out.put_string(failure.message);
}

void put_tables(Writer& out, State& state) {
  const auto& operators = state.operators.all();
  out.put<uint32_t>(static_cast<uint32_t>(operators.size()));
  for (const Operator& op : operators) {
    out.put_string(op.name);
    out.put_string(op.overload);
  }
  const auto generators = state.generators.numbers();
  out.put<uint32_t>(static_cast<uint32_t>(generators.size()));
  for (const uint32_t number : generators) {
    const auto bytes = state.generators.state(number);
    out.put<uint32_t>(number);
    out.put<uint32_t>(static_cast<uint32_t>(bytes.size()));
    out.put_bytes(bytes.data(), bytes.size());
  }
  out.put<uint32_t>(static_cast<uint32_t>(state.events.size()));
  for (const auto& [number, stamp] : state.events) {
    out.put<uint32_t>(number);
    out.put<int64_t>(stamp);
  }
  out.put<uint32_t>(state.failures);
  out.put<uint8_t>(state.pending.has_value());
  if (state.pending) put_failure(out, *state.pending);
}

// The storage table; where the data of each lies follows from the order and the sizes.
void put_storages(Writer& out, const Storages& storages) {
  uint32_t count = 0;
  const size_t count_at = out.size();
  out.put<uint32_t>(0);
  for (uint32_t id = 0; id < storages.slots().size(); ++id) {
    const Slot& slot = storages.slots()[id];
    if (slot.life == Slot::Life::none) continue;
    ++count;
    out.put<uint32_t>(id);
    out.put(slot.life);
    out.put<uint32_t>(slot.stale);
    out.put<uint64_t>(slot.bytes);
    out.put<uint64_t>(saved(slot) ? slot.filled : 0);
    if (slot.life == Slot::Life::lost) out.put_string(*slot.cause);
  }
  out.patch<uint32_t>(count_at, count);
}

// Whether tmpfs gives out huge pages to who asks: they make filling a fresh file far cheaper.
bool huge_files() {
  std::ifstream setting("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  std::string text;
  std::getline(setting, text);
  return text.find("[advise]") != std::string::npos || text.find("[always]") != std::string::npos ||
         text.find("[within_size]") != std::string::npos;
}

void write_all(int fd, const std::byte* data, uint64_t count, uint64_t offset) {
  while (count != 0) {
    const ssize_t done = pwrite(fd, data, count, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) throw_errno("cannot write a snapshot");
    data += done;
    count -= static_cast<uint64_t>(done);
    offset += static_cast<uint64_t>(done);
  }
}

void read_all(int fd, std::byte* data, uint64_t count, uint64_t offset) {
  while (count != 0) {
    const ssize_t done = pread(fd, data, count, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) throw_errno("cannot read a snapshot");
    if (done == 0) refuse("it ends too early");
    data += done;
    count -= static_cast<uint64_t>(done);
    offset += static_cast<uint64_t>(done);
  }
}

// The bytes of a piece in host memory, in `buffer` if they have to be brought there.
const std::byte* host_bytes(const State& state, const Piece& piece,
                            std::vector<std::byte>& buffer) {
  const Slot& slot = state.storages.slots()[piece.id];
  if (state.device.type() == c10::DeviceType::CPU) {
    return static_cast<const std::byte*>(slot.storage.data()) + piece.storage_offset;
  }
  buffer.resize(piece.count);
  state.storages.read(slot, piece.storage_offset, buffer);
  return buffer.data();
}

void write_data(int fd, const State& state, const std::vector<Piece>& pieces, uint64_t total) {
  const bool host = state.device.type() == c10::DeviceType::CPU;
  Mapping mapping;
  if (total >= 2 * kHugeBytes && huge_files()) {
    mapping = map_file(fd, total, true);
    madvise(mapping.data(), mapping.size(), MADV_HUGEPAGE);  // a hint: refusal costs only time
  }
  in_parallel(pieces, host, [&](const Piece& piece, std::vector<std::byte>& buffer) {
    const std::byte* bytes = host_bytes(state, piece, buffer);
    if (mapping) {
      std::memcpy(mapping.data() + piece.file_offset, bytes, piece.count);
    } else {
      write_all(fd, bytes, piece.count, piece.file_offset);
    }
  });
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

void load_generators(Reader& in, State& state) {
  const uint32_t count = in.get_count(8);
  for (uint32_t i = 0; i < count && in.ok(); ++i) {
    const uint32_t number = in.get<uint32_t>();
    const auto bytes = in.get_bytes(in.get<uint32_t>());
    if (in.ok()) state.generators.set_state(number, bytes);
  }
}

void load_rest(Reader& in, State& state) {
  const uint32_t events = in.get_count(12);
  if (events > State::kEventsMax) refuse("too many events");
  for (uint32_t i = 0; i < events && in.ok(); ++i) {
    const uint32_t number = in.get<uint32_t>();
    state.events[number] = in.get<int64_t>();
  }
  state.failures = in.get<uint32_t>();
  if (in.get<uint8_t>() == 0) return;
  Failure failure;
  failure.kind = in.get<ErrorKind>();
  failure.position = in.get<uint64_t>();
  failure.operation = in.get_string();
  failure.message = in.get_string();
  if (failure.kind > ErrorKind::lost_operand) refuse("an unknown kind of error");
  state.pending = std::move(failure);
}

// Fresh memory is faulted in page by page unless it may come in large ones.
void advise_huge(std::byte* data, uint64_t bytes) {
  const auto first = (reinterpret_cast<uintptr_t>(data) + kHugeBytes - 1) & ~(kHugeBytes - 1);
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(kHugeBytes - 1);
  if (end > first) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}

std::vector<Piece> load_storages(Reader& in, State& state, uint64_t end, uint64_t total) {
  const bool host = state.device.type() == c10::DeviceType::CPU;
  std::vector<Piece> pieces;
  const uint32_t count = in.get_count(25);
  for (uint32_t i = 0; i < count && in.ok(); ++i) {
    const uint32_t id = in.get<uint32_t>();
    const auto life = in.get<Slot::Life>();
    const uint32_t stale = in.get<uint32_t>();
    const uint64_t bytes = in.get<uint64_t>();
    const uint64_t filled = in.get<uint64_t>();
    const bool lost = life == Slot::Life::lost;
    std::string cause(lost ? in.get_string() : std::string_view());
    if (!in.ok()) break;
    if (id >= Storages::kCountMax || bytes > Storages::kBytesMax || filled > bytes ||
        (life != Slot::Life::live && !lost) || (lost && filled != 0)) {
      refuse("an impossible storage");
    }
    if (lost) {
      state.storages.lose(id, std::make_shared<const std::string>(std::move(cause)), bytes);
      continue;
    }
    state.storages.allocate(id, bytes);
    if (filled != 0) {
      const uint64_t at = place(end, filled);
      if (at > total || filled > total - at) refuse("a storage lies behind its end");
      end = at + filled;
      std::byte* data = state.storages.restore(id, filled);
      if (host) advise_huge(data, bytes);
      add_pieces(pieces, id, at, filled);
    }
    state.storages.restore_stale(id, stale);
  }
  return pieces;
}

}  // namespace

File::~File() {
  if (fd_ >= 0) close(fd_);
}

int File::release() noexcept { return std::exchange(fd_, -1); }

int write_snapshot(State& state, uint64_t position, uint64_t& bytes) {
  Writer tables;
  put_tables(tables, state);
  put_storages(tables, state.storages);
  std::vector<Piece> pieces;
  uint64_t end = sizeof(SnapshotHeader) + tables.size();
  for (uint32_t id = 0; id < state.storages.slots().size(); ++id) {
    const Slot& slot = state.storages.slots()[id];
    if (!saved(slot)) continue;
    const uint64_t at = place(end, slot.filled);
    add_pieces(pieces, id, at, slot.filled);
    end = at + slot.filled;
  }
  const bool host = state.device.type() == c10::DeviceType::CPU;
  const SnapshotHeader header{kSnapshotMagic,
                              kSnapshotVersion,
                              static_cast<uint32_t>(host ? DeviceKind::software : DeviceKind::cuda),
                              position,
                              tables.size(),
                              end};
  File file(memfd_create("sing-snapshot", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.fd() < 0) throw_errno("cannot make a snapshot");
  if (ftruncate(file.fd(), static_cast<off_t>(end)) != 0) throw_errno("cannot make a snapshot");
  write_data(file.fd(), state, pieces, end);
  write_all(file.fd(), tables.view().data(), tables.size(), sizeof(header));
  // The header last: a file without it is no snapshot.
  write_all(file.fd(), reinterpret_cast<const std::byte*>(&header), sizeof(header), 0);
  bytes = end;
  return file.release();
}

uint64_t load_snapshot(int fd, State& state) {
  const uint64_t total = file_bytes(fd);
  SnapshotHeader header{};
  read_all(fd, reinterpret_cast<std::byte*>(&header), sizeof(header), 0);
  if (header.magic != kSnapshotMagic) refuse("it is none");
  if (header.version != kSnapshotVersion) {
    refuse("it has version " + std::to_string(header.version));
  }
  if (header.total_bytes != total || header.table_bytes > total - sizeof(header)) {
    refuse("it is torn");
  }
  std::vector<std::byte> tables(header.table_bytes);
  read_all(fd, tables.data(), tables.size(), sizeof(header));
  Reader in(tables);
  load_operators(in, state);
  load_generators(in, state);
  load_rest(in, state);
  const auto pieces = load_storages(in, state, sizeof(header) + header.table_bytes, total);
  if (!in.ok() || in.remaining() != 0) refuse("its tables cannot be read");
  const bool host = state.device.type() == c10::DeviceType::CPU;
  in_parallel(pieces, host, [&](const Piece& piece, std::vector<std::byte>& buffer) {
    if (host) {
      std::byte* data = state.storages.host_data(piece.id);
      read_all(fd, data + piece.storage_offset, piece.count, piece.file_offset);
    } else {
      buffer.resize(piece.count);
      read_all(fd, buffer.data(), piece.count, piece.file_offset);
      state.storages.write(state.storages.at(piece.id), piece.storage_offset, buffer);
    }
  });
  return header.position;
}

}  // namespace sing
