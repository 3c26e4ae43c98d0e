#include "worker/replicas/rendezvous.h"

#include <algorithm>

#include "worker/loop/clock.h"

namespace sing {

namespace {

// Limits on the wait for a session: one whose program computes, and one whose program waits for
// its peers, or that is parked. The latter may just be about to continue. It is waited for as long
// as a copy would take, with fresh memory for it: then both together take at most twice as long as
// the better one.
constexpr uint64_t kWaitNs = 2'000'000'000;
constexpr uint64_t kRestNs = 50'000'000;
constexpr uint64_t kCopyBytesPerNs = 1;
// After this many failures in a row, the number of opportunities that are skipped grows no more.
constexpr uint64_t kFailuresMax = 10;

}  // namespace

void Rendezvous::join(uint32_t session, std::function<bool()> rests) {
  const std::lock_guard lock(mutex_);
  members_[session] = std::move(rests);
}

void Rendezvous::leave(uint32_t session) noexcept {
  std::vector<Share> unused;
  const std::lock_guard lock(mutex_);
  members_.erase(session);
  forget(session, unused);
}

void Rendezvous::end_waiting(uint32_t session) noexcept {
  std::vector<Share> unused;  // freed after the lock was released
  const std::lock_guard lock(mutex_);
  forget(session, unused);
}

void Rendezvous::forget(uint32_t session, std::vector<Share>& unused) {
  waiting_.erase(session);
  for (auto gift = gifts_.begin(); gift != gifts_.end();) {
    gift->left.erase(session);
    const auto next = std::next(gift);
    if (gift->left.empty()) {
      std::move(gift->versions.begin(), gift->versions.end(), std::back_inserter(unused));
      gifts_.erase(gift);
    }
    gift = next;
  }
  gifts_left_ = gifts_.size();
}

// With the lock of the table.
Rendezvous::Owners Rendezvous::find_owners(uint32_t session, const ContentId& call,
                                           const Versions& changed,
                                           std::span<const ContentId> made) const {
  Owners found;
  // An owner of a result could not be given it once more.
  found.possible = std::none_of(made.begin(), made.end(), [this](const ContentId& id) {
    return replicas_.versions_.contains(id);
  });
  for (const Share::Version* version : changed) {
    const auto& owners = version->owners;
    for (auto owner = owners.begin(); owner != owners.end(); ++owner) {
      found.possible &= std::find(owners.begin(), owner, *owner) == owner;
      if (*owner != session) add_owner(*owner, call, *version, found);
    }
  }
  found.possible &= !found.come.empty() || !found.missing.empty();
  return found;
}

void Rendezvous::add_owner(uint32_t owner, const ContentId& call, const Share::Version& version,
                           Owners& owners) const {
  if (owner == holder_) {
    for (const Gift& gift : gifts_) owners.missing.insert(gift.left.begin(), gift.left.end());
    return;
  }
  const auto found = waiting_.find(owner);
  if (found == waiting_.end() || found->second.given) {
    owners.missing.insert(owner);
    owners.possible &= members_.contains(owner);
    return;
  }
  const Waiting& waiting = found->second;
  owners.come.insert(owner);
  owners.possible &=
      waiting.call == call &&
      std::find(waiting.changed.begin(), waiting.changed.end(), &version) != waiting.changed.end();
}

bool Rendezvous::is_first(uint32_t session, const ContentId& call) const {
  const auto own = waiting_.find(session);
  const uint64_t number = own == waiting_.end() ? UINT64_MAX : own->second.number;
  return std::none_of(waiting_.begin(), waiting_.end(), [&](const auto& each) {
    const Waiting& other = each.second;
    return other.call == call && !other.given && other.number < number;
  });
}

bool Rendezvous::is_over(Waiting& waiting, const std::set<uint32_t>& missing) const {
  const uint64_t now = monotonic_ns();
  if (now >= waiting.until_ns) return true;
  for (const uint32_t session : missing) {
    uint64_t& since = waiting.resting_since[session];
    if (!members_.at(session)()) {
      since = 0;
    } else if (since == 0) {
      since = now;
    } else if (now - since >= waiting.rest_ns) {
      return true;
    }
  }
  return false;
}

Rendezvous::Outcome Rendezvous::meet(uint32_t session, const ContentId& call,
                                     std::span<Share* const> changed,
                                     std::span<const ContentId> made, bool copies) {
  const std::lock_guard lock(mutex_);
  if (!members_.contains(session)) return Outcome::alone;
  Versions versions;
  for (const Share* share : changed) versions.push_back(share->version_);
  Owners owners;
  {
    const std::lock_guard table(replicas_.mutex_);
    if (holder_ == 0) holder_ = ++replicas_.last_session_;
    owners = find_owners(session, call, versions, made);
    if (owners.possible && owners.missing.empty() && is_first(session, call)) {
      if (!copies) {
        for (Share* share : changed) replicas_.give_up(*share);
      }
      waiting_.erase(session);
      partners_ = std::move(owners.come);
      failures_ = 0;
      ++figures_.together;
      return Outcome::together;
    }
  }
  auto own = waiting_.find(session);
  if (!owners.possible) {
    waiting_.erase(session);
    return Outcome::alone;
  }
  if (own == waiting_.end()) {
    if (skipped_ > 0) {
      --skipped_;
      return Outcome::alone;
    }
    uint64_t bytes = 0;
    for (const Share::Version* version : versions) bytes += version->bytes;
    own = waiting_.emplace(session, Waiting()).first;
    own->second = {.call = call,
                   .number = ++last_number_,
                   .changed = std::move(versions),
                   .made = {made.begin(), made.end()},
                   .resting_since = {},
                   .until_ns = monotonic_ns() + kWaitNs,
                   .rest_ns = kRestNs + bytes / kCopyBytesPerNs};
  }
  if (!is_over(own->second, owners.missing)) return Outcome::waits;
  failures_ = std::min(failures_ + 1, kFailuresMax);
  skipped_ = uint64_t{1} << failures_;
  ++figures_.missed;
  waiting_.erase(session);
  return Outcome::alone;
}

void Rendezvous::give(std::span<const ContentId> made) {
  const std::lock_guard lock(mutex_);
  Gift gift;
  replicas_.find(made, holder_, gift.versions);
  for (const uint32_t partner : partners_) waiting_.at(partner).given = true;
  gift.left = std::exchange(partners_, {});
  if (!gift.left.empty()) gifts_.push_back(std::move(gift));
  gifts_left_ = gifts_.size();
}

bool Rendezvous::given(uint32_t session) const {
  const std::lock_guard lock(mutex_);
  const auto found = waiting_.find(session);
  return found != waiting_.end() && found->second.given;
}

bool Rendezvous::ready(uint32_t session) {
  const std::lock_guard lock(mutex_);
  const auto found = waiting_.find(session);
  if (found == waiting_.end()) return gifts_.empty();
  if (found->second.given) return true;
  Waiting& waiting = found->second;
  Owners owners;
  {
    const std::lock_guard table(replicas_.mutex_);
    owners = find_owners(session, waiting.call, waiting.changed, waiting.made);
  }
  return !owners.possible || (owners.missing.empty() && is_first(session, waiting.call)) ||
         is_over(waiting, owners.missing);
}

Rendezvous::Figures Rendezvous::figures() const {
  const std::lock_guard lock(mutex_);
  return figures_;
}

}  // namespace sing
