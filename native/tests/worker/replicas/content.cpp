// Content ids: different inputs have different ids.
#include "worker/replicas/content.h"

#include <unordered_set>
#include <vector>

#include "tests/check.h"

using namespace sing;

TEST(content_ids_differ_by_length_by_kind_and_by_each_bit) {
  std::vector<std::byte> bytes(3000);
  std::unordered_set<ContentId> ids;
  size_t made = 0;
  const auto add = [&](size_t count, Hashed kind) {
    const ContentId id = hash({bytes.data(), count}, kind);
    EXPECT(id);
    EXPECT(id.high > 1);
    EXPECT(id == hash({bytes.data(), count}, kind));
    ids.insert(id);
    ++made;
  };
  for (size_t count = 0; count <= bytes.size(); ++count) add(count, Hashed::bytes);
  add(0, Hashed::call);
  add(bytes.size(), Hashed::part);
  for (std::byte& byte : bytes) {
    for (int bit = 0; bit < 8; ++bit) {
      byte = static_cast<std::byte>(1 << bit);
      add(bytes.size(), Hashed::bytes);
    }
    byte = std::byte(0);
  }
  EXPECT_EQ(ids.size(), made);
}
