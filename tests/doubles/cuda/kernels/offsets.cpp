#include "kernels/offsets.h"

#include <string.h>

namespace sing_double {
namespace {

constexpr size_t kDimensionsMax = 25;
constexpr size_t kDivider = 3 * sizeof(uint32_t);  // a size, and constants to divide by it
constexpr size_t kSizesAt = sizeof(int), kStridesAt = kSizesAt + kDimensionsMax * kDivider;

uint32_t number_at(const char* from) {
  uint32_t number;
  memcpy(&number, from, sizeof number);
  return number;
}

}  // namespace

size_t Offsets::bytes(size_t operands) {
  return kStridesAt + kDimensionsMax * operands * sizeof(uint32_t);
}

Offsets Offsets::read(const char* from, size_t operands) {
  Offsets found;
  const size_t dimensions = number_at(from);
  for (size_t dim = 0; dim < dimensions; ++dim) {
    found.sizes.push_back(number_at(from + kSizesAt + dim * kDivider));
    found.strides.emplace_back();
    for (size_t operand = 0; operand < operands; ++operand) {
      const size_t index = dim * operands + operand;
      found.strides.back().push_back(number_at(from + kStridesAt + index * sizeof(uint32_t)));
    }
  }
  return found;
}

uint64_t Offsets::count() const {
  uint64_t product = 1;
  for (const uint32_t size : sizes) product *= size;
  return product;
}

uint64_t Offsets::extent(size_t operand, size_t element) const {
  uint64_t sum = element;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    sum += static_cast<uint64_t>(sizes[dim] - 1) * strides[dim][operand];
  }
  return sum;
}

uint64_t Offsets::at(uint64_t number, size_t operand) const {
  uint64_t offset = 0;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    offset += number % sizes[dim] * strides[dim][operand];
    number /= sizes[dim];
  }
  return offset;
}

}  // namespace sing_double
