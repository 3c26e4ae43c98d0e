// Geometry of a tensor (dtype, sizes, strides, offset) in records and answers.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include "oplog/codec.h"

namespace sing {

using Dimensions = c10::SmallVector<int64_t, 6>;

struct Geometry {
  at::ScalarType dtype = at::ScalarType::Float;
  uint8_t flags = 0;  // TensorFlags
  int64_t offset = 0;
  Dimensions sizes;
  Dimensions strides;

  bool operator==(const Geometry& other) const {
    return dtype == other.dtype && offset == other.offset && sizes == other.sizes &&
           strides == other.strides;
  }

  // Bytes that a storage needs to hold this tensor.
  uint64_t storage_bytes() const {
    uint64_t last = static_cast<uint64_t>(offset) + 1;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] == 0) return 0;
      last += static_cast<uint64_t>(strides[i]) * static_cast<uint64_t>(sizes[i] - 1);
    }
    return last * c10::elementSize(dtype);
  }

  bool is_contiguous() const {
    int64_t expected = 1;
    for (size_t i = sizes.size(); i-- > 0;) {
      if (sizes[i] == 0) return true;
      if (sizes[i] != 1 && strides[i] != expected) return false;
      expected *= sizes[i];
    }
    return true;
  }
};

// Computes the strides that an encoding without strides implies (sizes of zero count as one).
inline void contiguous_strides(const Dimensions& sizes, Dimensions& strides) {
  strides.resize(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = step;
    if (sizes[i] > 1 && __builtin_mul_overflow(step, sizes[i], &step)) step = 0;
  }
}

inline bool has_contiguous_strides(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (strides[i] != step) return false;
    if (sizes[i] > 1) step *= sizes[i];
  }
  return true;
}

// There are few dimensions: a loop is faster than the call of memcpy.
inline std::byte* put_words(std::byte* at, c10::IntArrayRef words) noexcept {
  for (const int64_t word : words) {
    std::memcpy(at, &word, sizeof(word));
    at += sizeof(word);
  }
  return at;
}

// Writes the same bytes to several writers. Refuses what no reader would accept: a record that
// cannot be read ends the session.
template <class... Writers>
void put_geometries(at::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                    int64_t offset, uint8_t flags, Writers&... writers) {
  TORCH_CHECK(sizes.size() <= kDimensionsMax, "a proxied device takes tensors with up to ",
              static_cast<int>(kDimensionsMax), " dims, not ", sizes.size());
  if (has_contiguous_strides(sizes, strides)) flags |= kContiguous;
  if (offset != 0) flags |= kHasOffset;
  const uint8_t head[4] = {static_cast<uint8_t>(dtype), static_cast<uint8_t>(sizes.size()), flags,
                           0};
  const size_t words = sizes.size() * ((flags & kContiguous) != 0 ? 1 : 2) + (offset != 0 ? 1 : 0);
  const auto put = [&](Writer& out) {
    std::byte* at = out.extend(sizeof(head) + words * sizeof(int64_t));
    std::memcpy(at, head, sizeof(head));
    at += sizeof(head);
    if (offset != 0) at = put_words(at, offset);
    at = put_words(at, sizes);
    if (!(flags & kContiguous)) put_words(at, strides);
  };
  (put(writers), ...);
}

inline void put_geometry(Writer& out, at::ScalarType dtype, c10::IntArrayRef sizes,
                         c10::IntArrayRef strides, int64_t offset, uint8_t flags = 0) {
  put_geometries(dtype, sizes, strides, offset, flags, out);
}

inline uint8_t tensor_flags(const at::Tensor& tensor) {
  return static_cast<uint8_t>(
      (tensor.unsafeGetTensorImpl()->is_wrapped_number() ? kWrappedNumber : 0) |
      (tensor.is_conj() ? kConjugate : 0) | (tensor.is_neg() ? kNegative : 0));
}

inline void put_geometry(Writer& out, const at::Tensor& tensor) {
  put_geometry(out, tensor.scalar_type(), tensor.sizes(), tensor.strides(), tensor.storage_offset(),
               tensor_flags(tensor));
}

inline void put_geometry(Writer& out, const Geometry& geometry) {
  put_geometry(out, geometry.dtype, geometry.sizes, geometry.strides, geometry.offset,
               static_cast<uint8_t>(geometry.flags & ~(kContiguous | kHasOffset)));
}

// Reads a geometry and rejects what no tensor can have: unknown dtypes, negative sizes, strides or
// offsets, extents beyond 2^62 bytes. After a rejection reader.ok() is false.
inline Geometry get_geometry(Reader& in) {
  Geometry geometry;
  const uint8_t dtype = in.get<uint8_t>();
  const uint8_t dimensions = in.get<uint8_t>();
  geometry.flags = in.get<uint8_t>();
  const uint8_t zero = in.get<uint8_t>();
  constexpr uint8_t known = kContiguous | kWrappedNumber | kConjugate | kNegative | kHasOffset;
  if (dtype >= static_cast<uint8_t>(at::ScalarType::Undefined) || dimensions > kDimensionsMax ||
      zero != 0 || (geometry.flags & ~known) != 0) {
    in.fail();
  }
  if (!in.ok()) return geometry;
  geometry.dtype = static_cast<at::ScalarType>(dtype);
  if (geometry.flags & kHasOffset) geometry.offset = in.get<int64_t>();
  const auto read = [&](Dimensions& into) {
    const auto bytes = in.get_bytes(size_t{dimensions} * sizeof(int64_t));
    into.resize(bytes.size() / sizeof(int64_t));
    if (!bytes.empty()) std::memcpy(into.data(), bytes.data(), bytes.size());
  };
  read(geometry.sizes);
  if (geometry.flags & kContiguous) {
    contiguous_strides(geometry.sizes, geometry.strides);
  } else {
    read(geometry.strides);
  }
  if (!in.ok()) return geometry;
  // Extents in elements, so that storage_bytes cannot overflow.
  constexpr int64_t limit = int64_t{1} << 58;
  int64_t last = geometry.offset;
  if (last < 0 || last > limit) in.fail();
  for (size_t i = 0; in.ok() && i < geometry.sizes.size(); ++i) {
    const int64_t size = geometry.sizes[i], stride = geometry.strides[i];
    int64_t reach = 0;
    if (size < 0 || stride < 0 || size > limit || stride > limit ||
        (size > 1 && __builtin_mul_overflow(size - 1, stride, &reach)) || reach > limit ||
        (last += reach) > limit) {
      in.fail();
    }
  }
  return geometry;
}

}  // namespace sing
