#include "worker/replicas/rewrite.h"

#include <algorithm>
#include <cstring>

namespace sing {

void Left::remove(uint64_t offset, uint64_t count) {
  const Range part{offset, offset + count};
  std::vector<Range> left;
  for (const Range& range : ranges_) {
    if (const uint64_t end = std::min(range.end, part.begin); range.begin < end) {
      left.push_back({range.begin, end});
    }
    if (const uint64_t begin = std::max(range.begin, part.end); begin < range.end) {
      left.push_back({begin, range.end});
    }
  }
  ranges_ = std::move(left);
}

void Rewrite::leave_upload(c10::Storage storage) {
  const auto* const from = static_cast<const std::byte*>(storage_.data());
  auto* const to = static_cast<std::byte*>(storage.mutable_data());
  uint64_t at = 0;
  for (const auto& [begin, end] : left_.ranges()) {
    std::memcpy(to + at, from + at, begin - at);
    at = end;
  }
  std::memcpy(to + at, from + at, storage_.nbytes() - at);
  storage_ = std::move(storage);
  upload_ = {};
}

void Rewrite::move_to(c10::Storage storage) {
  std::memcpy(storage.mutable_data(), storage_.data(),
              std::min(storage.nbytes(), storage_.nbytes()));
  storage_ = std::move(storage);
}

void Rewrite::finish() {
  const auto* from = before_ ? static_cast<const std::byte*>(before_.storage().data()) : nullptr;
  auto* const to = static_cast<std::byte*>(storage_.mutable_data());
  for (const auto& [begin, end] : left_.ranges()) {
    if (from) {
      std::memcpy(to + begin, from + begin, end - begin);
    } else {
      std::memset(to + begin, 0, end - begin);
    }
  }
  left_.clear();
  before_.reset();
}

}  // namespace sing
