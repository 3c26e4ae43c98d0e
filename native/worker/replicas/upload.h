// Bytes that sessions upload at the same time, by one name.
//
// Note [Shared uploads]. All ranks receive the result of a collective at the same time. A large one
// is uploaded in pieces, while other ranks have their turns in between, and is a version only when
// it is complete. Until then each would have memory of its own for it. But what has the same name
// has the same bytes: the pieces go to one place, and the session that is first writes them. A
// session knows how many of the bytes are its own by now; if it uses them before it has uploaded
// the rest, it takes a copy of these. A snapshot of a session whose storage had no bytes before
// saves them from there: what was written stays as it is as long as the session takes part.
#pragma once

#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

#include "worker/replicas/replicas.h"

namespace sing {

class Upload {
 public:
  Upload(Replicas& table, const ContentId& name, c10::Storage storage)
      : table_(table), name_(name), storage_(std::move(storage)) {}
  ~Upload();
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

  const ContentId& name() const noexcept { return name_; }
  const c10::Storage& storage() const noexcept { return storage_; }
  // The next piece of a session, whose pieces before are there. Returns how many bytes of it were
  // there already.
  uint64_t put(uint64_t offset, std::span<const std::byte> bytes);
  // The first session has completed it, so that it is a version: it stays as it is while others
  // have not.
  void keep();

 private:
  friend class Uploading;
  Replicas& table_;
  const ContentId name_;
  const c10::Storage storage_;
  std::mutex mutex_;  // everything below
  uint64_t filled_ = 0;
  Share kept_;
};

// The part of one session in an upload. Its bytes count as shared.
class Uploading {
 public:
  Uploading() = default;
  Uploading(std::shared_ptr<Upload> upload, uint32_t session);
  Uploading(Uploading&& other) noexcept
      : upload_(std::move(other.upload_)), session_(other.session_) {}
  Uploading& operator=(Uploading other) noexcept {
    std::swap(upload_, other.upload_);
    std::swap(session_, other.session_);
    return *this;
  }
  ~Uploading();

  const std::shared_ptr<Upload>& upload() const noexcept { return upload_; }

 private:
  std::shared_ptr<Upload> upload_;
  uint32_t session_ = 0;
};

}  // namespace sing
