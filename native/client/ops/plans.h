// The geometry cache: what an operator returns for operands of a given geometry.
//
// The key holds everything a result's geometry may depend on (operator, dtypes, sizes, strides,
// integers, …) and no storage numbers. Keys are compared whole; a hash decides nothing.
//
// Note [Nearby plans]: every operator looks here, so each thread keeps the plans that it used
// lately in a table of its own, where neither a lock nor a count of users is needed. A plan never
// changes and stays true, so nothing is ever taken out of there but to make room. That must not
// happen while the plan is in use: a call that waits may run Python's signal handlers, which make
// calls. So only the outermost call of a thread replaces entries; what others found is held until
// then.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "oplog/geometry.h"

namespace sing::client {

struct Output {
  Tag tag = Tag::none;  // none, undefined, tensor, alias, list, integer
  Geometry geometry;
  uint64_t bytes = 0;  // of the storage, for a tensor
  int32_t source = 0;  // alias: an operand (>= 0) or an earlier output (-1 - index), both flat
  std::vector<Output> items;
  int64_t number = 0;  // an integer: not sent, as the worker makes it, too
};

// An out= operand that gets another geometry.
struct Change {
  uint16_t operand = 0;
  uint16_t element = 0;
  uint64_t bytes = 0;
  Geometry geometry;
};

struct Plan {
  std::vector<Output> outputs;  // one per return
  std::vector<Change> changes;
  std::vector<std::byte> key;  // once it is in the cache
};

Output tensor_output(at::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides);
Output contiguous_output(at::ScalarType dtype, c10::IntArrayRef sizes);
Output undefined_output();

class PlanCache {
 public:
  static PlanCache& get();
  // Null if there is none. It lives until the calling thread is in no call and looks again.
  const Plan* find(std::span<const std::byte> key, bool outermost);
  // The same, of the plans that this thread has used lately.
  const Plan* find_nearby(std::span<const std::byte> key);
  uint64_t hits() const;
  uint64_t misses() const;
  void insert(std::span<const std::byte> key, std::shared_ptr<Plan> plan);

 private:
  class Nearby;
  struct Key {
    std::span<const std::byte> bytes;
    uint64_t hash;
    bool operator==(const Key& other) const noexcept;
  };
  struct Hash {
    size_t operator()(const Key& key) const noexcept { return key.hash; }
  };

  static Key key_of(std::span<const std::byte> bytes) noexcept;
  static Nearby& nearby();

  // Growing shapes make keys without end; an emptied cache fills again at no risk.
  static constexpr size_t kPlansMax = 1 << 16;
  mutable std::mutex mutex_;
  uint64_t hits_ = 0, misses_ = 0;  // hits here, and of threads that have ended
  std::vector<const Nearby*> threads_;
  std::unordered_map<Key, std::shared_ptr<const Plan>, Hash> plans_;  // keys lie in the plans
};

}  // namespace sing::client
