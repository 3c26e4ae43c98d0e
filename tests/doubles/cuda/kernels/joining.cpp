#include "kernels/joining.h"

#include <string.h>

#include <array>
#include <regex>
#include <vector>

#include "device/memory.h"

namespace sing_double {
namespace {

constexpr int kIllegalAddress = 700;
constexpr size_t kDimensionsMax = 4;

// torch's TensorSizeStride, in elements.
struct Shape {
  std::array<uint32_t, kDimensionsMax> sizes, strides;

  // Offset of an element, if the dimension of concatenation has another size.
  uint64_t at(uint32_t number, size_t dimensions, size_t joined, uint32_t size) const {
    uint64_t offset = 0;
    for (size_t dim = dimensions - 1; dim > 0; --dim) {
      const uint32_t here = dim == joined ? size : sizes[dim];
      offset += static_cast<uint64_t>(number % here) * strides[dim];
      number /= here;
    }
    return offset + static_cast<uint64_t>(number) * strides[0];
  }
};

struct Part {
  const char* data;
  uint32_t begin, size, elements;  // begin and size: along the dimension of concatenation
  bool contiguous;
  Shape shape;
};

struct Kind {
  size_t element;  // bytes that are copied at once
  size_t dimensions, parts_max, shapes;
  size_t unit;  // elements of the tensors in what is copied at once
};

template <typename Field>
Field field_at(const char* from, size_t index = 0) {
  Field field;
  memcpy(&field, from + index * sizeof field, sizeof field);
  return field;
}

// torch's CatArrInputTensorMetadata: an array for each field.
std::vector<Part> parts_of(const Kind& kind, const char* from, unsigned count) {
  const size_t begins = kind.parts_max * sizeof(char*), word = kind.parts_max * sizeof(uint32_t);
  const char* flags = from + begins + 3 * word;
  std::vector<Part> parts;
  for (size_t index = 0; index < count; ++index) {
    Part part;
    part.data = field_at<const char*>(from, index);
    part.begin = field_at<uint32_t>(from + begins, index);
    part.size = field_at<uint32_t>(from + begins + word, index);
    part.elements = field_at<uint32_t>(from + begins + 2 * word, index);
    part.contiguous = kind.shapes == 1 || flags[index];
    part.shape = field_at<Shape>(flags + kind.parts_max, kind.shapes == 1 ? 0 : index);
    parts.push_back(part);
  }
  return parts;
}

int join(const Kind& kind, char* output, const std::vector<Part>& parts, const Shape& shape,
         size_t joined, uint32_t stride) {
  for (const Part& part : parts) {
    const uint64_t begin = static_cast<uint64_t>(part.begin) * stride / kind.unit;
    const uint32_t count = part.elements / static_cast<uint32_t>(kind.unit);
    uint32_t size = part.size;
    if (kind.unit > 1) size = size * stride / static_cast<uint32_t>(kind.unit);
    for (uint32_t number = 0; number < count; ++number) {
      const uint64_t to = begin + shape.at(number, kind.dimensions, joined, size);
      const uint64_t from =
          part.contiguous ? number : part.shape.at(number, kind.dimensions, joined, size);
      const char* source = memory::bytes_at(part.data + from * kind.element, kind.element);
      char* target = memory::bytes_at(output + to * kind.element, kind.element);
      if (!source || !target) return kIllegalAddress;
      memcpy(target, source, kind.element);
    }
  }
  return 0;
}

// (output, parts, shape of the output, dimension, stride of the output along it; the vectorized
// kernel takes the elements behind one step of the dimension instead)
Work prepared(const Kind& kind, void** arguments, const Grid& grid) {
  char* output = *static_cast<char**>(arguments[0]);
  const std::vector<Part> parts = parts_of(kind, static_cast<char*>(arguments[1]), grid.y);
  const Shape shape = field_at<Shape>(static_cast<char*>(arguments[2]));
  const auto joined = static_cast<size_t>(field_at<int>(static_cast<char*>(arguments[3])));
  const uint32_t stride = field_at<uint32_t>(static_cast<char*>(arguments[4]));
  return [=] { return join(kind, output, parts, shape, joined, stride); };
}

}  // namespace

Prepare concatenation_named(const std::string& name) {
  static const auto* kName = new std::regex(
      "^void at::native::\\(anonymous namespace\\)::CatArrayBatchedCopy(_contig|_alignedK_contig|"
      "_vectorized|)<at::native::\\(anonymous namespace\\)::OpaqueType<(\\d+)u>, unsigned int, "
      "(\\d), (\\d+), (\\d+)(?:, (\\d+))?(?:, (\\d+))?>");
  std::smatch found;
  if (!std::regex_search(name, found, *kName)) return nullptr;
  Kind kind = {std::stoul(found[2]), std::stoul(found[3]), std::stoul(found[4]),
               std::stoul(found[5]), 1};
  if (found[1] == "_vectorized") {
    kind.element = std::stoul(found[6]);
    kind.unit = std::stoul(found[7]);
  }
  return [kind](void** arguments, const Grid& grid) { return prepared(kind, arguments, grid); };
}

}  // namespace sing_double
