// The geometry cache: what an operator returns for operands of a given geometry.
//
// The key holds everything on which a result's geometry may depend (operator, dtypes, sizes,
// strides, integers, …) and no storage numbers. Keys are compared as a whole, never only by hash.
//
// Note [Nearby plans]: every operator looks here, so each thread keeps its recently used plans in a
// table of its own, which needs neither a lock nor reference counts. A plan never changes and stays
// valid, so entries are removed only to make room. That must not happen while the plan is in use: a
// call that waits may run Python's signal handlers, which make calls. So only the outermost call of
// a thread replaces entries; plans that nested calls found are held until then.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "client/log/forks.h"
#include "oplog/geometry.h"

namespace sing::client {

struct Output {
  Tag tag = Tag::none;  // none, undefined, tensor, alias, list, integer
  Geometry geometry;
  uint64_t bytes = 0;  // of the storage, for a tensor
  int32_t source = 0;  // alias: an operand (>= 0) or an earlier output (-1 - index), both numbered
                       // flat
  std::vector<Output> items;
  int64_t number = 0;  // an integer: not sent, as the worker computes it, too
};

// New geometry of an out= operand.
struct Change {
  uint16_t operand = 0;
  uint16_t element = 0;
  uint64_t bytes = 0;
  Geometry geometry;
};

struct Plan {
  std::vector<Output> outputs;  // one per return
  std::vector<Change> changes;
  std::vector<std::byte> key;  // set once the plan is in the cache
};

Output tensor_output(at::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides);
Output contiguous_output(at::ScalarType dtype, c10::IntArrayRef sizes);
Output undefined_output();

class PlanCache {
 public:
  static PlanCache& get();
  // Returns null if there is none. The plan is valid until the calling thread's next lookup outside
  // of any call.
  const Plan* find(std::span<const std::byte> key, bool outermost);
  // The same, among the plans that this thread has used recently.
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

  // Growing shapes make an unlimited number of keys; clearing the cache is safe, as it fills again.
  static constexpr size_t kPlansMax = 1 << 16;
  mutable std::mutex mutex_;
  const HeldAtFork held_{mutex_};
  uint64_t hits_ = 0, misses_ = 0;  // hits in this cache, and those of threads that have ended
  std::vector<const Nearby*> threads_;
  std::unordered_map<Key, std::shared_ptr<const Plan>, Hash> plans_;  // the keys are stored in the
                                                                      // plans
};

}  // namespace sing::client
