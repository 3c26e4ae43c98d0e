// Content ids: numbers for the bytes of a storage, equal only if the bytes are equal.
//
// An id is a hash of 128 bits: of the bytes themselves, or of what computed them. The hash follows
// VHASH (T. Krovetz, W. Dai: "VMAC: Message Authentication Code using Universal Hashing",
// draft-krovetz-vmac-01, 2007): NH on blocks of 1 KiB, a polynomial over 2^127-1 of the blocks, and
// a product modulo 2^64-257; twice, with keys of which the second ones are shifted (Toeplitz), so
// that two different inputs have the same id with a probability of about 2^-120. The keys are
// random, those of all processes of a job are the same: a program that does not know them cannot
// construct a collision, and ids mean nothing outside of their job.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <span>

namespace sing {

struct ContentId {
  uint64_t high = 0;
  uint64_t low = 0;

  // False: unknown.
  explicit operator bool() const noexcept { return high != 0; }
  bool operator==(const ContentId&) const = default;

  // Of a storage whose bytes are all zero because it was never written. No hash has this id.
  static ContentId zeros(uint64_t bytes) noexcept { return {1, bytes}; }
};

// Kinds of input, so that inputs of two kinds have different ids.
enum class Hashed : uint64_t { bytes, part, call, result, operand, name };

// Number of random bytes from which the keys are made.
size_t key_bytes() noexcept;
// Replaces the keys, before anything is hashed. Throws if the number of bytes is another one.
void use_keys(std::span<const std::byte> random);

ContentId hash(std::span<const std::byte> bytes, Hashed kind) noexcept;
inline ContentId hash(std::initializer_list<uint64_t> words, Hashed kind) noexcept {
  return hash(std::as_bytes(std::span(words.begin(), words.size())), kind);
}

}  // namespace sing

template <>
struct std::hash<sing::ContentId> {
  size_t operator()(const sing::ContentId& id) const noexcept { return id.low; }
};
