// The geometry cache: what an operator returns for operands of a given geometry.
//
// The key holds everything a result's geometry may depend on (operator, dtypes, sizes, strides,
// integers, …) and no storage numbers. Keys are compared whole; a hash decides nothing.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "oplog/geometry.h"

namespace sing::client {

struct Output {
  Tag tag = Tag::none;  // none, undefined, tensor, alias, list
  Geometry geometry;
  uint64_t bytes = 0;  // of the storage, for a tensor
  int32_t source = 0;  // alias: an operand (>= 0) or an earlier output (-1 - index), both flat
  std::vector<Output> items;
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
};

Output tensor_output(at::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides);
Output contiguous_output(at::ScalarType dtype, c10::IntArrayRef sizes);
Output undefined_output();

class PlanCache {
 public:
  static PlanCache& get();
  std::shared_ptr<const Plan> find(std::span<const std::byte> key) const;
  uint64_t hits() const;
  uint64_t misses() const;
  void insert(std::span<const std::byte> key, std::shared_ptr<const Plan> plan);

 private:
  // Growing shapes make keys without end; an emptied cache fills again at no risk.
  static constexpr size_t kPlansMax = 1 << 16;
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
  };
  mutable std::mutex mutex_;
  mutable uint64_t hits_ = 0, misses_ = 0;
  std::unordered_map<std::string, std::shared_ptr<const Plan>, Hash, std::equal_to<>> plans_;
};

}  // namespace sing::client
