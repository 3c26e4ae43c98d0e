// Bytes that several sessions of one process have in common, and hold once.
//
// Note [Replicas]. The ranks of a data-parallel job hold equal parameters, optimizer state and
// reduced gradients. A worker that executes the logs of several ranks (a *seat*, on a software
// device) holds them once, and executes what computes them once. It never assumes that bytes are
// equal: it derives that from the logs (value numbering). Every storage has a content id:
//   - uploaded bytes: the hash of the bytes;
//   - the results of an operator and the operands that it changes: a hash of the operator, its
//     other arguments, torch's settings, the contents of its operands, and the result's number;
//   - unknown, if an operator draws random numbers, or may do what its operands do not determine.
// A *version* is bytes with a known content; its owners are storages of any session. Before a call
// is executed, the ids of its results are looked up: if there are versions of all of them, the
// results become their owners, and no kernel runs (*squash*). Before its bytes change, a storage
// leaves its version; if the version has other owners, the storage takes a copy, unless they all
// are to change it by the same call: see Note [Rendezvous] in rendezvous.h.
//
// No two storages of a session own one version: operators may tell tensors that share memory from
// others.
//
// What is uploaded and what was computed may be the same bytes (the root of a broadcast computes
// what the others receive). So bytes that are read are hashed too, and their version is found by
// both ids; a storage has the first id of its version. What collectives read, and what they give,
// is not hashed: it has a name (ContentName), of which its id is derived. A storage has this id
// then: so what the root of a broadcast computes of it has the id that it has on the other ranks,
// also if the root has freed it before they receive it.
//
// What a session has computed in another process of its job has the same ids there: see
// Note [Moves] in moved.h. If it comes without its ids, its bytes are hashed before anything is
// executed, and so are the versions of their sizes.
//
// Results that only other results of the same kind need are not computed: see Note [Postponed] in
// postponed.h.
//
// Each owner counts the bytes in full in its session's account: what a session may allocate does
// not depend on other sessions.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "worker/replicas/content.h"
#include "worker/replicas/recent_calls.h"

namespace sing {

class Rendezvous;
class Replicas;
class Requested;
class Upload;

// One owner of a version.
class Share {
 public:
  Share() = default;
  // One more owner, of the same session.
  Share(const Share& other);
  Share(Share&& other) noexcept
      : version_(std::exchange(other.version_, nullptr)), session_(other.session_) {}
  Share& operator=(Share other) noexcept {
    std::swap(version_, other.version_);
    std::swap(session_, other.session_);
    return *this;
  }
  ~Share() { reset(); }

  explicit operator bool() const noexcept { return version_ != nullptr; }
  const ContentId& id() const noexcept { return version_->id; }
  const c10::Storage& storage() const noexcept { return version_->storage; }
  void reset() noexcept {
    if (version_) leave(/*only_alone=*/false);
  }
  // Ends the ownership if there is no other owner, and returns true: then the bytes are no version
  // any more, and may be changed.
  bool leave_if_alone() noexcept { return leave(/*only_alone=*/true); }

 private:
  friend class Rendezvous;
  friend class Replicas;
  struct Version {
    Replicas& table;
    const ContentId id;
    bool hashed;                            // one of its ids is that of the bytes
    c10::SmallVector<ContentId, 1> others;  // ids by which it is found, too
    const c10::Storage storage;
    const uint64_t bytes;
    c10::SmallVector<uint32_t, 8> owners;  // their sessions
    bool given_up = false;                 // the bytes are other ones by now
  };
  Share(Version* version, uint32_t session) noexcept : version_(version), session_(session) {}
  bool leave(bool only_alone) noexcept;

  Version* version_ = nullptr;
  uint32_t session_ = 0;
};

// The versions of a process. Outlives its sessions, which may use it at the same time.
class Replicas {
 public:
  using Hash = ContentId (*)(std::span<const std::byte> bytes);
  static ContentId hash_bytes(std::span<const std::byte> bytes) noexcept {
    return sing::hash(bytes, Hashed::bytes);
  }
  // `hash`: of the bytes of storages; tests use a worse one.
  explicit Replicas(Hash hash = &hash_bytes);
  ~Replicas();
  Replicas(const Replicas&) = delete;
  Replicas& operator=(const Replicas&) = delete;

  ContentId hash(std::span<const std::byte> bytes) const { return hash_(bytes); }

  // Returns a number for a session, which it has until it leaves.
  uint32_t join();
  void leave(uint32_t session) noexcept;
  // Where sessions that have turns meet.
  Rendezvous& rendezvous() noexcept { return *rendezvous_; }
  // What their requests have returned.
  Requested& requested() noexcept { return *requested_; }
  // Returns a share of the version with that id for a session; empty if there is none, or the
  // session owns it already. `id` becomes the first id of the version.
  Share find(ContentId& id, uint32_t session);
  // The same for several; returns how many were found.
  size_t find(std::span<const ContentId> ids, uint32_t session, std::vector<Share>& shares);
  // Hashes of bytes, by several threads.
  std::vector<ContentId> hash_all(std::span<const std::span<const std::byte>> bytes) const;
  // Lets versions of these sizes be found by the hashes of their bytes, too.
  void hash_versions(const std::set<uint64_t>& sizes, uint32_t session);
  // True if another session has versions, or may make some.
  bool has_others() const;
  // Bytes of the versions that a session owns together with others.
  uint64_t shared(uint32_t session) const;
  // Shares of all versions, and the ids by which they are found, each with the number of its share.
  // What is pinned stays as it is.
  struct Pinned {
    std::vector<Share> shares;
    std::vector<std::pair<ContentId, uint64_t>> ids;
  };
  Pinned pin();
  // Makes bytes that will not change a version, unless there is one: then like find().
  // `of_bytes`: the id is the hash of the bytes.
  Share enter(ContentId& id, uint32_t session, const c10::Storage& storage, bool of_bytes);
  // True if a version is found by the hash of its bytes.
  bool is_hashed(const Share& share) const;
  // The version is also found by this id, if there is none with it.
  void also(const Share& share, const ContentId& id, bool of_bytes);

  // Returns what sessions upload by this name: see Note [Shared uploads] in upload.h. The first one
  // takes memory from the allocator.
  std::shared_ptr<Upload> upload(const ContentId& name, c10::Allocator* allocator, uint64_t bytes);

  // Of the calls with known contents that were executed last, by sessions that exist.
  void note_executed(const ContentId& call, uint32_t session);
  bool executed_by_another(const ContentId& call, uint32_t session) const;

  struct Figures {
    uint64_t versions;      // existing ones
    uint64_t bytes_shared;  // that further owners would need if they held the bytes themselves
    uint64_t executed;      // calls whose results have contents
    uint64_t squashed;      // calls that were not executed
    uint64_t postponed;     // of those, with results that did not exist
    uint64_t recomputed;    // of those, executed after all
    uint64_t uploads_shared;
    uint64_t given_up;  // shares of versions: see Note [Ahead] in ahead.h
  };
  Figures figures() const;
  void count_squashed(bool postponed) noexcept {
    squashed_.fetch_add(1, std::memory_order_relaxed);
    if (postponed) postponed_.fetch_add(1, std::memory_order_relaxed);
  }
  void count_recomputed() noexcept { recomputed_.fetch_add(1, std::memory_order_relaxed); }
  void count_upload() noexcept { uploads_shared_.fetch_add(1, std::memory_order_relaxed); }
  void count_given_up() noexcept { given_up_.fetch_add(1, std::memory_order_relaxed); }

 private:
  // Most other ids of a version: what never changes may be read again and again.
  static constexpr size_t kOthersMax = 8;
  friend class Rendezvous;
  friend class Share;
  friend class Upload;
  friend class Uploading;
  using Version = Share::Version;
  Version* own(ContentId& id, uint32_t session);
  // With the lock: all that changes the owners of a version.
  void add_owner(Version& version, uint32_t session);
  // Returns true if the session is no owner any more. There is another one.
  bool remove_owner(Version& version, uint32_t session) noexcept;
  static bool owns(const Version& version, uint32_t session) noexcept;
  static bool is_of_one(const Version& version) noexcept;
  void count_shared(uint32_t session, uint64_t bytes) noexcept;
  // With the lock: the bytes are to be changed for all owners, so the version is found no more. The
  // share leaves it.
  void give_up(Share& share) noexcept;
  void remove(const Version& version) noexcept;
  void forget_upload(const ContentId& name) noexcept;
  void count_uploading(uint32_t session, uint64_t bytes) noexcept;
  // Returns a share of no session.
  Share keep(ContentId id);

  const Hash hash_;
  std::atomic<uint64_t> squashed_{0}, postponed_{0}, recomputed_{0}, uploads_shared_{0},
      given_up_{0};
  std::mutex hashing_;        // of versions; taken before the other one
  mutable std::mutex mutex_;  // everything below, and the owners of versions
  std::unordered_map<ContentId, Version*> versions_;
  std::unordered_map<ContentId, std::weak_ptr<Upload>> uploads_;
  uint32_t last_session_ = 0;
  std::unordered_map<uint32_t, uint64_t> sessions_;  // with the bytes that they share
  RecentCalls executed_;
  uint64_t executed_count_ = 0;
  uint64_t count_ = 0;
  uint64_t bytes_shared_ = 0;
  const std::unique_ptr<Requested> requested_;
  const std::unique_ptr<Rendezvous> rendezvous_;  // leaves versions when it ends
};

}  // namespace sing
