#include "worker/replicas/replicas.h"

#include <algorithm>
#include <memory>
#include <thread>

#include "worker/replicas/rendezvous.h"
#include "worker/replicas/requested.h"
#include "worker/replicas/upload.h"
#include "worker/state/storages.h"

namespace sing {

namespace {

// More of them would not hash faster: memory is the limit.
constexpr unsigned kThreadsMax = 4;

}  // namespace

Replicas::Replicas(Hash hash)
    : hash_(hash),
      requested_(std::make_unique<Requested>()),
      rendezvous_(std::make_unique<Rendezvous>(*this)) {}

Replicas::~Replicas() = default;

Share::Share(const Share& other) : version_(other.version_), session_(other.session_) {
  if (!version_) return;
  std::lock_guard lock(version_->table.mutex_);
  version_->table.add_owner(*version_, session_);
}

bool Share::leave(bool only_alone) noexcept {
  Replicas& table = version_->table;
  {
    std::lock_guard lock(table.mutex_);
    if (version_->owners.size() > 1) {
      if (only_alone) return false;
      const bool last = table.remove_owner(*version_, session_);
      if (last && !version_->given_up) table.bytes_shared_ -= version_->bytes;
      version_ = nullptr;
      return false;
    }
    if (!version_->given_up) table.remove(*version_);
  }
  // After the lock was released: freeing large storages takes a while.
  delete std::exchange(version_, nullptr);
  return true;
}

void Replicas::remove(const Version& version) noexcept {
  versions_.erase(version.id);
  for (const ContentId& id : version.others) versions_.erase(id);
  --count_;
}

void Replicas::add_owner(Version& version, uint32_t session) {
  auto& owners = version.owners;
  if (!owns(version, session)) {
    count_shared(session, version.bytes);
    if (is_of_one(version)) count_shared(owners.front(), version.bytes);
  }
  owners.push_back(session);
}

bool Replicas::remove_owner(Version& version, uint32_t session) noexcept {
  const bool one_before = is_of_one(version);
  auto& owners = version.owners;
  owners.erase(std::find(owners.begin(), owners.end(), session));
  if (owns(version, session)) return false;
  if (!one_before) {
    count_shared(session, -version.bytes);
    if (is_of_one(version)) count_shared(owners.front(), -version.bytes);
  }
  return true;
}

bool Replicas::owns(const Version& version, uint32_t session) noexcept {
  const auto& owners = version.owners;
  return std::find(owners.begin(), owners.end(), session) != owners.end();
}

bool Replicas::is_of_one(const Version& version) noexcept {
  return std::ranges::all_of(version.owners,
                             [&](uint32_t owner) { return owner == version.owners.front(); });
}

void Replicas::count_shared(uint32_t session, uint64_t bytes) noexcept {
  const auto found = sessions_.find(session);
  if (found != sessions_.end()) found->second += bytes;
}

void Replicas::give_up(Share& share) noexcept {
  Version& version = *std::exchange(share.version_, nullptr);
  remove(version);
  bytes_shared_ -= version.bytes * (version.owners.size() - 1);
  remove_owner(version, share.session_);
  version.given_up = true;
  if (version.owners.empty()) delete &version;  // its storage is still that of the slot
}

uint32_t Replicas::join() {
  std::lock_guard lock(mutex_);
  sessions_.emplace(++last_session_, 0);
  return last_session_;
}

void Replicas::leave(uint32_t session) noexcept {
  rendezvous_->leave(session);
  std::lock_guard lock(mutex_);
  sessions_.erase(session);
}

Replicas::Version* Replicas::own(ContentId& id, uint32_t session) {
  const auto found = versions_.find(id);
  if (found == versions_.end()) return nullptr;
  Version& version = *found->second;
  id = version.id;
  if (owns(version, session)) return nullptr;
  add_owner(version, session);
  bytes_shared_ += version.bytes;
  return &version;
}

Share Replicas::find(ContentId& id, uint32_t session) {
  std::lock_guard lock(mutex_);
  return Share(own(id, session), session);
}

size_t Replicas::find(std::span<const ContentId> ids, uint32_t session,
                      std::vector<Share>& shares) {
  size_t found = 0;
  shares.reserve(ids.size());
  std::lock_guard lock(mutex_);
  for (ContentId id : ids) {
    shares.push_back(Share(own(id, session), session));
    found += static_cast<bool>(shares.back());
  }
  return found;
}

void Replicas::note_executed(const ContentId& call, uint32_t session) {
  std::lock_guard lock(mutex_);
  ++executed_count_;
  executed_.note(call, session);
}

bool Replicas::executed_by_another(const ContentId& call, uint32_t session) const {
  std::lock_guard lock(mutex_);
  const uint32_t found = executed_.find(call);
  return found != session && sessions_.contains(found);
}

std::vector<ContentId> Replicas::hash_all(std::span<const std::span<const std::byte>> bytes) const {
  std::vector<ContentId> ids(bytes.size());
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < bytes.size(); i = next++) ids[i] = hash(bytes[i]);
  };
  const size_t most = std::clamp(std::thread::hardware_concurrency(), 1u, kThreadsMax);
  std::vector<std::jthread> threads;
  for (size_t i = 1; i < std::min(most, bytes.size()); ++i) threads.emplace_back(work);
  work();
  threads.clear();
  return ids;
}

void Replicas::hash_versions(const std::set<uint64_t>& sizes, uint32_t session) {
  const std::lock_guard hashing(hashing_);  // the next session finds these hashed
  std::vector<Share> others;  // a version that has one more owner is not changed meanwhile
  {
    std::lock_guard lock(mutex_);
    for (const auto& [id, version] : versions_) {
      if (version->hashed || id != version->id || !sizes.contains(version->bytes)) continue;
      ContentId first = id;
      if (Version* owned = own(first, session)) others.push_back(Share(owned, session));
    }
  }
  std::vector<std::span<const std::byte>> bytes;
  for (const Share& each : others) {
    bytes.emplace_back(static_cast<const std::byte*>(each.storage().data()),
                       each.storage().nbytes());
  }
  const std::vector<ContentId> ids = hash_all(bytes);
  for (size_t i = 0; i < others.size(); ++i) also(others[i], ids[i], /*of_bytes=*/true);
}

bool Replicas::has_others() const {
  std::lock_guard lock(mutex_);
  return sessions_.size() > 1;
}

uint64_t Replicas::shared(uint32_t session) const {
  std::lock_guard lock(mutex_);
  return sessions_.at(session);
}

Replicas::Pinned Replicas::pin() {
  Pinned pinned;
  std::lock_guard lock(mutex_);
  const uint32_t owner = ++last_session_;  // executes nothing
  pinned.shares.reserve(count_);
  pinned.ids.reserve(versions_.size());
  for (const auto& [id, version] : versions_) {
    if (id != version->id) continue;
    for (const ContentId& other : version->others) {
      pinned.ids.emplace_back(other, pinned.shares.size());
    }
    pinned.ids.emplace_back(id, pinned.shares.size());
    ContentId first = id;
    pinned.shares.push_back(Share(own(first, owner), owner));
  }
  return pinned;
}

Share Replicas::enter(ContentId& id, uint32_t session, const c10::Storage& storage, bool of_bytes) {
  auto fresh = std::unique_ptr<Version>(
      new Version{*this, id, of_bytes, {}, storage, storage.nbytes(), {session}});
  std::lock_guard lock(mutex_);
  if (versions_.contains(id)) return Share(own(id, session), session);
  versions_.emplace(id, fresh.get());
  ++count_;
  return Share(fresh.release(), session);
}

std::shared_ptr<Upload> Replicas::upload(const ContentId& name, c10::Allocator* allocator,
                                         uint64_t bytes) {
  {
    std::lock_guard lock(mutex_);
    const auto found = uploads_.find(name);
    if (auto upload = found == uploads_.end() ? nullptr : found->second.lock()) return upload;
  }
  auto made = std::make_shared<Upload>(*this, name, fresh_storage(allocator, bytes));
  std::lock_guard lock(mutex_);
  uploads_[name] = made;
  return made;
}

void Replicas::forget_upload(const ContentId& name) noexcept {
  std::lock_guard lock(mutex_);
  const auto found = uploads_.find(name);
  if (found != uploads_.end() && found->second.expired()) uploads_.erase(found);
}

void Replicas::count_uploading(uint32_t session, uint64_t bytes) noexcept {
  std::lock_guard lock(mutex_);
  count_shared(session, bytes);
}

Share Replicas::keep(ContentId id) {
  std::lock_guard lock(mutex_);
  const uint32_t owner = ++last_session_;  // executes nothing
  return Share(own(id, owner), owner);
}

bool Replicas::is_hashed(const Share& share) const {
  std::lock_guard lock(mutex_);
  return share.version_->hashed;
}

void Replicas::also(const Share& share, const ContentId& id, bool of_bytes) {
  std::lock_guard lock(mutex_);
  Version& version = *share.version_;
  if (version.others.size() >= kOthersMax || !versions_.emplace(id, &version).second) return;
  version.others.push_back(id);
  version.hashed |= of_bytes;
}

Replicas::Figures Replicas::figures() const {
  std::lock_guard lock(mutex_);
  return {count_,
          bytes_shared_,
          executed_count_,
          squashed_.load(),
          postponed_.load(),
          recomputed_.load(),
          uploads_shared_.load(),
          given_up_.load()};
}

}  // namespace sing
