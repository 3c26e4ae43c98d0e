// Records of the op log: header, primitive reader and writer. Independent of torch.
//
// A record is a RecordHeader and its payload, padded with zeros to a multiple of 8 bytes. Every
// byte that a worker reads was written by a notebook process and is untrusted: Reader never reads
// past its span, and after the first error every further read returns zero and ok() stays false. So
// a parser checks once, before it uses what it read. docs/format.md describes the payload of every
// kind.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>

#include "oplog/layout.h"

namespace sing {

enum class RecordKind : uint8_t {
  define = 1,       // an operator's number and name
  storages = 2,     // allocations and frees, in order
  call = 3,         // one operator
  write = 4,        // bytes from the host into a storage
  read = 5,         // bytes of a storage to the host (a request: it has an answer)
  resize = 6,       // a storage changes its size, its bytes are kept
  synchronize = 7,  // a request without bytes: reports a pending error
  generator = 8,    // create, seed, get or set the state of a random number generator
  event = 9,        // record, free, or elapsed time between two (a request)
  settings = 10,    // torch's settings from here on
  answered = 11,    // how an earlier request was answered
};

enum RecordFlags : uint8_t {
  kRequest = 1,    // the client awaits an answer
  kGradients = 2,  // a call with autograd switched on: some kernels then keep more for backward
  kNamed = 4,      // a write or read of a whole storage, whose bytes have a name
  kLast = 8,       // a read of bytes that are not used again until they were overwritten
};

// A name of bytes: the ranks of a job give it to the result of one collective, which is the same on
// all of them. Two things with one name are equal.
struct ContentName {
  uint64_t high = 0;
  uint64_t low = 0;

  explicit operator bool() const noexcept { return high != 0 || low != 0; }
};

struct RecordHeader {
  uint32_t bytes;  // header and payload and padding
  uint8_t kind;
  uint8_t flags;
  uint16_t reserved;
};
static_assert(sizeof(RecordHeader) == 8);

// Entry in the payload of a storages record, which is a count, four zero bytes, and these entries.
// Freeing an unused number is idempotent.
struct StorageEntry {
  uint32_t id;
  uint32_t action;  // StorageAction
  uint64_t bytes;
};
static_assert(sizeof(StorageEntry) == 16);
enum class StorageAction : uint32_t { allocate = 0, free = 1 };

// Kind of an operator's failure, so that the notebook raises the exception that torch would raise.
enum class ErrorKind : uint8_t {
  runtime = 0,
  out_of_memory = 1,
  not_implemented = 2,
  index = 3,
  value = 4,
  type = 5,
  linear_algebra = 6,
  lost_operand = 7,  // an operand is the output of an operator that failed
  out_of_host_memory = 8,
};

enum class GeneratorAction : uint8_t { seed = 0, get_state = 1, set_state = 2, free = 3, copy = 4 };
enum class EventAction : uint8_t { record = 0, free = 1, elapsed = 2 };

// Tags of encoded values (values.h), also of the outputs of a call.
enum class Tag : uint8_t {
  none = 0,
  tensor = 1,       // a device tensor: number of its storage and geometry
  undefined = 2,    // Tensor()
  host_tensor = 3,  // a small CPU tensor, bytes inline
  integer = 4,
  real = 5,
  boolean = 6,
  complex = 7,
  string = 8,
  integers = 9,
  reals = 10,
  booleans = 11,
  list = 12,    // any other list: count, values
  device = 13,  // 0 CPU, 1 the session's device
  generator = 14,
  alias = 15,     // outputs only: shares the storage of an operand
  compound = 16,  // a sparse tensor: compound.h
};

class Writer {
 public:
  void clear() noexcept { size_ = 0; }
  size_t size() const noexcept { return size_; }
  std::span<const std::byte> view() const noexcept { return {bytes_.get(), size_}; }

  template <class T>
  void put(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::memcpy(extend(sizeof(T)), &value, sizeof(T));
  }
  void put_bytes(const void* data, size_t count) {
    if (count != 0) std::memcpy(extend(count), data, count);
  }
  void put_string(std::string_view text) {
    put<uint32_t>(static_cast<uint32_t>(text.size()));
    put_bytes(text.data(), text.size());
  }
  // Appends `count` bytes, which the caller fills in.
  std::byte* extend(size_t count) {
    if (size_ + count > capacity_) [[unlikely]]
      grow(size_ + count);
    std::byte* at = bytes_.get() + size_;
    size_ += count;
    return at;
  }
  template <class T>
  void patch(size_t offset, T value) noexcept {
    std::memcpy(bytes_.get() + offset, &value, sizeof(T));
  }

 private:
  // Not a std::vector: its resize would clear bytes that are then overwritten.
  void grow(size_t needed) {
    const size_t capacity = needed * 2 + 256;
    std::unique_ptr<std::byte[]> bytes(new std::byte[capacity]);
    if (size_ != 0) std::memcpy(bytes.get(), bytes_.get(), size_);
    bytes_ = std::move(bytes);
    capacity_ = capacity;
  }
  std::unique_ptr<std::byte[]> bytes_;
  size_t size_ = 0;
  size_t capacity_ = 0;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) noexcept : bytes_(bytes) {}

  template <class T>
  T get() noexcept {
    static_assert(std::is_trivially_copyable_v<T>);
    T value{};
    if (const std::byte* from = take(sizeof(T))) std::memcpy(&value, from, sizeof(T));
    return value;
  }
  std::span<const std::byte> get_bytes(size_t count) noexcept {
    const std::byte* from = take(count);
    return from ? std::span<const std::byte>(from, count) : std::span<const std::byte>();
  }
  std::string_view get_string() noexcept {
    const auto bytes = get_bytes(get<uint32_t>());
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  // Reads a count of items of at least `item_bytes` each: a count too large for the remaining bytes
  // is an error.
  uint32_t get_count(size_t item_bytes) noexcept {
    const uint32_t count = get<uint32_t>();
    if (count > remaining() / (item_bytes ? item_bytes : 1)) fail();
    return ok_ ? count : 0;
  }
  void fail() noexcept { ok_ = false; }
  bool ok() const noexcept { return ok_; }
  size_t remaining() const noexcept { return ok_ ? bytes_.size() - at_ : 0; }

 private:
  const std::byte* take(size_t count) noexcept {
    if (!ok_ || count > bytes_.size() - at_) {
      ok_ = false;
      return nullptr;
    }
    const std::byte* from = bytes_.data() + at_;
    at_ += count;
    return from;
  }
  std::span<const std::byte> bytes_;
  size_t at_ = 0;
  bool ok_ = true;
};

// Geometry of a tensor: sizes, strides and offset, without its storage. Strides are omitted from
// the encoding if they are those of a contiguous tensor. Kernels support 64 dimensions at most, and
// report more as an error; tensors themselves may have more.
inline constexpr uint8_t kDimensionsMax = 128;
enum TensorFlags : uint8_t {
  kContiguous = 1,
  kWrappedNumber = 2,
  kConjugate = 4,
  kNegative = 8,
  kHasOffset = 16,
};

inline size_t padded(size_t bytes) noexcept { return (bytes + 7) & ~size_t{7}; }

// Checks a header against the bytes in the log; `available` is head minus the record's position.
inline bool valid(const RecordHeader& header, uint64_t available) noexcept {
  return header.bytes >= sizeof(RecordHeader) && header.bytes % 8 == 0 &&
         header.bytes <= kRecordBytesMax && header.bytes <= available &&
         header.kind >= static_cast<uint8_t>(RecordKind::define) &&
         header.kind <= static_cast<uint8_t>(RecordKind::answered) && header.reserved == 0;
}

}  // namespace sing
