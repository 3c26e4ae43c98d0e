// A version that its owner overwrites part by part.
//
// Note [Rewrites]. After a reduction, all ranks own the version of a gradient bucket, and each then
// overwrites it, one gradient after the other. So the owner does not copy the version when it
// changes the first part: it takes other memory, the parts that are overwritten are noted, and what
// remains is copied when the storage is used in another way, or at the end of a turn. A part counts
// as overwritten when its operator has succeeded; if it fails, the old bytes are copied.
#pragma once

#include <c10/core/Storage.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "worker/replicas/replicas.h"
#include "worker/replicas/upload.h"

namespace sing {

// Ranges of bytes that are left when parts have been overwritten, in their order.
class Left {
 public:
  struct Range {
    uint64_t begin, end;
  };
  explicit Left(uint64_t bytes) : ranges_{{0, bytes}} {}
  void remove(uint64_t offset, uint64_t count);
  bool empty() const noexcept { return ranges_.empty(); }
  const std::vector<Range>& ranges() const noexcept { return ranges_; }
  void clear() noexcept { ranges_.clear(); }

 private:
  std::vector<Range> ranges_;
};

class Rewrite {
 public:
  // `before`: the version; none: zeros. `storage`: other memory, of the size of the version.
  Rewrite(Share before, c10::Storage storage)
      : before_(std::move(before)), storage_(std::move(storage)), left_(storage_.nbytes()) {}
  // The parts are the pieces of an upload.
  Rewrite(Share before, Uploading upload)
      : before_(std::move(before)),
        upload_(std::move(upload)),
        storage_(upload_.upload()->storage()),
        left_(storage_.nbytes()) {}

  // None if the memory is that of the session alone.
  const std::shared_ptr<Upload>& upload() const noexcept { return upload_.upload(); }
  // Copies the parts into memory of the session.
  void leave_upload(c10::Storage storage);
  // Where the parts are written.
  const c10::Storage& storage() const noexcept { return storage_; }
  void note_overwritten(uint64_t offset, uint64_t count) { left_.remove(offset, count); }
  bool complete() const noexcept { return left_.empty(); }
  // Moves the parts to other memory, of the size of the version.
  void move_to(c10::Storage storage);
  // Copies what remains.
  void finish();

 private:
  Share before_;
  Uploading upload_;
  c10::Storage storage_;
  Left left_;
};

}  // namespace sing
