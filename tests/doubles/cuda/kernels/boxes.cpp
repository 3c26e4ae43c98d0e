#include "kernels/boxes.h"

#include <string.h>

#include <algorithm>
#include <array>
#include <regex>
#include <vector>

#include "device/memory.h"
#include "kernels/values.h"

namespace sing_double {
namespace {

constexpr int kIllegalAddress = 700;
constexpr size_t kBits = 64, kCorners = 4;

template <typename Field>
Field read(const void* from) {
  Field field;
  memcpy(&field, from, sizeof field);
  return field;
}

size_t words(size_t boxes) { return (boxes + kBits - 1) / kBits; }

template <typename Real>
bool overlap(const std::array<Real, kCorners>& a, const std::array<Real, kCorners>& b,
             float threshold) {
  const Real width = std::max(std::min(a[2], b[2]) - std::max(a[0], b[0]), Real(0));
  const Real height = std::max(std::min(a[3], b[3]) - std::max(a[1], b[1]), Real(0));
  const Real shared = width * height;
  const Real all = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared;
  return shared / all > static_cast<Real>(threshold);
}

// Sets the bit of each later box that overlaps a box, in the words of that box. As on a GPU, words
// that no block writes stay as they are.
template <typename Real>
void mark(Type type, size_t count, float threshold, const char* boxes, uint64_t* mask) {
  std::vector<std::array<Real, kCorners>> at(count);
  for (size_t box = 0; box < count; ++box) {
    for (size_t corner = 0; corner < kCorners; ++corner) {
      const char* from = boxes + (box * kCorners + corner) * size_of(type);
      at[box][corner] = static_cast<Real>(load(type, from).real);
    }
  }
  for (size_t box = 0; box < count; ++box) {
    for (size_t word = box / kBits; word < words(count); ++word) {
      uint64_t bits = 0;
      const size_t end = std::min(count, (word + 1) * kBits);
      for (size_t other = std::max(box + 1, word * kBits); other < end; ++other) {
        if (overlap(at[box], at[other], threshold)) bits |= 1ull << other % kBits;
      }
      mask[box * words(count) + word] = bits;
    }
  }
}

// nms_kernel_impl<T>(boxes, threshold, corners, mask)
Work marking(Type type, void** arguments) {
  const auto count = static_cast<size_t>(read<int>(arguments[0]));
  const auto threshold = static_cast<float>(read<double>(arguments[1]));
  const char *given = read<const char*>(arguments[2]), *result = read<const char*>(arguments[3]);
  return [=] {
    const char* boxes = memory::bytes_at(given, count * kCorners * size_of(type));
    auto* mask = reinterpret_cast<uint64_t*>(
        memory::bytes_at(result, count * words(count) * sizeof(uint64_t)));
    if (!boxes || !mask) return kIllegalAddress;
    if (type == Type::f64) {
      mark<double>(type, count, threshold, boxes, mask);
    } else {
      mark<float>(type, count, threshold, boxes, mask);
    }
    return 0;
  };
}

// gather_keep_from_mask(kept, mask, boxes)
Work keeping(void** arguments) {
  const char *result = read<const char*>(arguments[0]), *given = read<const char*>(arguments[1]);
  const auto count = static_cast<size_t>(read<int>(arguments[2]));
  return [=] {
    char* kept = memory::bytes_at(result, count);
    const auto* mask = reinterpret_cast<uint64_t*>(
        memory::bytes_at(given, count * words(count) * sizeof(uint64_t)));
    if (!kept || !mask) return kIllegalAddress;
    std::vector<uint64_t> removed(words(count));
    for (size_t box = 0; box < count; ++box) {
      if (removed[box / kBits] >> box % kBits & 1) continue;
      kept[box] = 1;
      for (size_t word = box / kBits; word < words(count); ++word) {
        removed[word] |= mask[box * words(count) + word];
      }
    }
    return 0;
  };
}

}  // namespace

Prepare suppression_named(const std::string& name) {
  static const auto* kMarking = new std::regex(
      "^void vision::ops::\\(anonymous namespace\\)::nms_kernel_impl<([\\w: ]+)>\\(int, double, ");
  static const std::string kKeeping =
      "vision::ops::(anonymous namespace)::gather_keep_from_mask(bool*, unsigned long long const*, "
      "int)";
  std::smatch found;
  if (std::regex_search(name, found, *kMarking)) {
    const Type type = type_named(found[1]);
    return [type](void** arguments, const Grid&) { return marking(type, arguments); };
  }
  if (name != kKeeping) return nullptr;
  return [](void** arguments, const Grid&) { return keeping(arguments); };
}

}  // namespace sing_double
