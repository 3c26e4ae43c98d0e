// What the next records of a session do to a storage, before they are executed.
//
// Note [Ahead]. After a step, each rank's gradient bucket has equal bytes, which nothing needs any
// more: the first thing that a rank does with it is to overwrite it, part by part. A rank that
// begins would keep them for the others, which come later. But their programs run ahead of the
// device: what they do next is in their logs already, and is executed whatever happens. So before a
// rank overwrites a part of a version, each owner that waits for its turn gives up its bytes, if
// its records overwrite all of them before they use any. Its storage is then one that was never
// written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "oplog/codec.h"
#include "worker/operators/operators.h"
#include "worker/replicas/rewrite.h"

namespace sing {

class Ahead {
 public:
  // `id`: a storage of so many bytes.
  Ahead(const Operators& operators, uint32_t id, uint64_t bytes)
      : operators_(operators), id_(id), left_(bytes) {}

  // To be called with one record after the other; nothing is checked but what is read.
  enum class Found : uint8_t { nothing, overwritten, used };
  Found look(const RecordHeader& header, std::span<const std::byte> payload);
  // True if the record may change the storage.
  bool changes(const RecordHeader& header, std::span<const std::byte> payload) const;

 private:
  // What a call has to do with the storage.
  struct Uses {
    uint32_t count = 0;
    bool changed = false;
    bool whole_range = false;  // it only overwrites a contiguous part, which is the range
    uint64_t offset = 0, bytes = 0;
  };
  Found storages(Reader& in) const;
  Found write(Reader& in);
  Found call(Reader& in, bool predicted);
  // Returns nothing if the record cannot be read, or its operator is not known.
  std::optional<Uses> uses_of(Reader& in) const;
  void value(Reader& in, const ArgumentType& type, bool zeroed, int depth, Uses& uses) const;
  void tensor(Reader& in, const ArgumentType& type, bool zeroed, Uses& uses) const;
  Found overwrite(uint64_t offset, uint64_t count);

  const Operators& operators_;
  const uint32_t id_;
  Left left_;
};

}  // namespace sing
