#include "worker/replicas/upload.h"

#include <algorithm>
#include <cstring>

namespace sing {

Upload::~Upload() { table_.forget_upload(name_); }

uint64_t Upload::put(uint64_t offset, std::span<const std::byte> bytes) {
  const std::lock_guard lock(mutex_);
  const uint64_t end = offset + bytes.size();
  const uint64_t known = std::min(filled_ - std::min(filled_, offset), bytes.size());
  if (end > filled_) {
    auto* const to = static_cast<std::byte*>(storage_.mutable_data()) + offset;
    std::memcpy(to + known, bytes.data() + known, bytes.size() - known);
    filled_ = end;
  }
  return known;
}

void Upload::keep() {
  const std::lock_guard lock(mutex_);
  if (!kept_) kept_ = table_.keep(name_);
}

Uploading::Uploading(std::shared_ptr<Upload> upload, uint32_t session)
    : upload_(std::move(upload)), session_(session) {
  upload_->table_.count_uploading(session_, upload_->storage_.nbytes());
}

Uploading::~Uploading() {
  if (upload_) upload_->table_.count_uploading(session_, -upload_->storage_.nbytes());
}

}  // namespace sing
