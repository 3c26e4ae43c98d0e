// torch's OffsetCalculator, as its kernels receive it: sizes and strides of some operands.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sing_double {

struct Offsets {
  std::vector<uint32_t> sizes;                 // from the innermost dimension
  std::vector<std::vector<uint32_t>> strides;  // in bytes, by dimension and operand

  // Bytes that it occupies in a kernel's arguments.
  static size_t bytes(size_t operands);
  static Offsets read(const char* from, size_t operands);

  uint64_t count() const;
  // Bytes from the first to the last element of an operand.
  uint64_t extent(size_t operand, size_t element) const;
  // Offset of an operand's element.
  uint64_t at(uint64_t number, size_t operand) const;
};

}  // namespace sing_double
