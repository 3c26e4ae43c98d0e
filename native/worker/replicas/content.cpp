#include "worker/replicas/content.h"

#include <sys/random.h>

#include <array>
#include <cstring>
#include <stdexcept>

namespace sing {

namespace {

__extension__ using Wide = unsigned __int128;

constexpr size_t kBlockWords = 128;
constexpr size_t kBlockBytes = kBlockWords * sizeof(uint64_t);
constexpr size_t kPairBytes = 2 * sizeof(uint64_t);
constexpr Wide k127 = (Wide{1} << 127) - 1;
constexpr Wide k126 = (Wide{1} << 126) - 1;
// Bits of a polynomial's key that are used: products then fit without a carry.
constexpr uint64_t kKeyBits = 0x01ffffff1fffffff;

struct Keys {
  std::array<uint64_t, kBlockWords + 2> blocks;
  std::array<std::array<uint64_t, 2>, 2> polynomial;
  std::array<std::array<uint64_t, 2>, 2> last;

  Keys() {
    std::byte* const at = reinterpret_cast<std::byte*>(this);
    for (size_t made = 0; made < sizeof(*this);) {
      const ssize_t count = getrandom(at + made, sizeof(*this) - made, 0);
      if (count < 0) throw std::runtime_error("the system gives no random numbers");
      made += static_cast<size_t>(count);
    }
    restrict_bits();
  }

  void restrict_bits() noexcept {
    for (auto& key : polynomial) {
      for (uint64_t& word : key) word &= kKeyBits;
    }
  }
};

Keys& keys() {
  static Keys keys;
  return keys;
}

struct Two {
  Wide first = 0, second = 0;
};

uint64_t word_at(const std::byte* at) noexcept {
  uint64_t word;
  std::memcpy(&word, at, sizeof(word));
  return word;
}

// Adds the products of `pairs` pairs of words.
void add_products(Two& sums, const std::byte* at, const uint64_t* key, size_t pairs) noexcept {
  Wide first = sums.first, second = sums.second;
  for (size_t i = 0; i < pairs; ++i, at += kPairBytes, key += 2) {
    const uint64_t a = word_at(at), b = word_at(at + sizeof(uint64_t));
    first += static_cast<Wide>(a + key[0]) * (b + key[1]);
    second += static_cast<Wide>(a + key[2]) * (b + key[3]);
  }
  sums = {first, second};
}

// NH of one block; a shorter one counts as if zeros followed.
Two block_sums(const std::byte* at, size_t bytes, const Keys& keys) noexcept {
  Two sums;
  const size_t pairs = bytes / kPairBytes, rest = bytes % kPairBytes;
  add_products(sums, at, keys.blocks.data(), pairs);
  if (rest != 0) {
    std::byte last[kPairBytes] = {};
    std::memcpy(last, at + pairs * kPairBytes, rest);
    add_products(sums, last, keys.blocks.data() + 2 * pairs, 1);
  }
  return {sums.first & k126, sums.second & k126};
}

// Returns value * key + add modulo 2^127-1, not fully reduced.
Wide step(Wide value, const std::array<uint64_t, 2>& key, Wide add) noexcept {
  const auto high = static_cast<uint64_t>(value >> 64), low = static_cast<uint64_t>(value);
  const Wide low_low = static_cast<Wide>(low) * key[0];
  const Wide middle =
      static_cast<Wide>(low) * key[1] + static_cast<Wide>(high) * key[0] + (low_low >> 64);
  const Wide top = static_cast<Wide>(high) * key[1] + (middle >> 64);
  const Wide bottom = (middle << 64) | static_cast<uint64_t>(low_low);
  const Wide sum = (bottom & k127) + (bottom >> 127) + 2 * top + add;
  return (sum & k127) + (sum >> 127);
}

uint64_t fold(Wide value, const std::array<uint64_t, 2>& key) noexcept {
  constexpr uint64_t kBelow = 257;  // the prime is 2^64 - 257
  Wide product = static_cast<Wide>(static_cast<uint64_t>(value >> 64) + key[0]) *
                 (static_cast<uint64_t>(value) + key[1]);
  for (int i = 0; i < 2; ++i) {
    product = static_cast<Wide>(static_cast<uint64_t>(product >> 64)) * kBelow +
              static_cast<uint64_t>(product);
  }
  const auto rest = static_cast<uint64_t>(product);
  return (product >> 64) != 0 || rest >= -kBelow ? rest + kBelow : rest;
}

}  // namespace

size_t key_bytes() noexcept { return sizeof(Keys); }

void use_keys(std::span<const std::byte> random) {
  if (random.size() != sizeof(Keys)) throw std::invalid_argument("keys of another size");
  std::memcpy(&keys(), random.data(), random.size());
  keys().restrict_bits();
}

ContentId hash(std::span<const std::byte> bytes, Hashed kind) noexcept {
  const Keys& key = keys();
  Two value{1, 1};
  const auto next = [&](Two add) {
    value = {step(value.first, key.polynomial[0], add.first),
             step(value.second, key.polynomial[1], add.second)};
  };
  const std::byte* at = bytes.data();
  size_t left = bytes.size();
  for (; left > kBlockBytes; left -= kBlockBytes, at += kBlockBytes) {
    next(block_sums(at, kBlockBytes, key));
  }
  next(block_sums(at, left, key));
  const Wide end = (static_cast<Wide>(kind) << 64 | bytes.size()) & k126;
  next({end, end});
  ContentId id{fold(value.first, key.last[0]), fold(value.second, key.last[1])};
  if (id.high <= 1) id.high |= uint64_t{1} << 63;  // these have another meaning
  return id;
}

}  // namespace sing
