// Changes that sessions of one process make together to bytes that they hold once.
//
// Note [Rendezvous]. After a reduction, all ranks of a job change the parameters and the
// optimizer's state in place, by the same calls. If the first rank did so alone, the old bytes
// would have to stay for the others: a second copy of everything. So a session whose next call
// changes a large version waits for all other owners of it: its turn is interrupted before the
// record. When the next call of each owner is that call, the session that came first executes it in
// the memory of the version, for all. The others become owners of the result when their turns
// continue, before anything else is done with them: until then their storages hold bytes of a later
// position. So no order is obeyed, and no snapshot taken, in between.
//
// It is never assumed that an owner will come. If one does not soon, the version is copied, as one
// that others still need; after such a failure, the next opportunities are not taken.
//
// The call must not fail after it has changed something. So only operators are executed in this way
// that change each element by itself (`Row::by_elements`), with operands whose shapes and dtypes
// fit, after they have been rehearsed on tensors of one element. If one fails nevertheless, the
// process ends: its sessions continue from their snapshots.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "worker/replicas/content.h"
#include "worker/replicas/replicas.h"

namespace sing {

// The meetings of a process. Sessions are known by their numbers in its Replicas.
class Rendezvous {
 public:
  explicit Rendezvous(Replicas& replicas) : replicas_(replicas) {}
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  // --- any thread ---
  // From now until leave(), others may wait for the session. `rests`: returns true if it is not
  // expected to execute anything soon; called in turns of other sessions.
  void join(uint32_t session, std::function<bool()> rests);
  void leave(uint32_t session) noexcept;

  // --- in a turn of the session ---
  enum class Outcome : uint8_t {
    alone,     // the call is to be executed as usual
    waits,     // not now
    together,  // in the memory of the versions, which are none any more; then give() is to be
               // called
  };
  // Before a call that changes `changed`, and makes versions with the ids `made`.
  // `copies`: executed together, it does not use the memory of the versions.
  Outcome meet(uint32_t session, const ContentId& call, std::span<Share* const> changed,
               std::span<const ContentId> made, bool copies);
  // `made`: the versions that the call has made. They exist until all others own them.
  void give(std::span<const ContentId> made);
  // True if sessions are to become owners of what was given.
  bool gives() const noexcept { return gifts_left_.load(std::memory_order_relaxed) != 0; }
  // True if another session has executed its next record for it: then it must be executed before
  // anything else is done.
  bool given(uint32_t session) const;
  // The session waits no more: it owns what was given, or obeys an order.
  void end_waiting(uint32_t session) noexcept;

  // --- the executor ---
  // True if the turn of a session that waits is to continue.
  bool ready(uint32_t session);

  struct Figures {
    uint64_t together;  // calls
    uint64_t missed;    // calls for which an owner did not come
  };
  Figures figures() const;

 private:
  using Versions = std::vector<const Share::Version*>;
  struct Waiting {
    ContentId call;
    uint64_t number = 0;  // the lowest is of the session that came first
    Versions changed;
    std::vector<ContentId> made;
    std::map<uint32_t, uint64_t> resting_since;  // owners that have not come, and rest
    uint64_t until_ns = 0;
    uint64_t rest_ns = 0;  // how long one may rest
    bool given = false;
  };
  struct Gift {
    std::vector<Share> versions;
    std::set<uint32_t> left;  // sessions that are to become owners
  };
  // The other owners of the versions that a call changes.
  struct Owners {
    bool possible = true;  // to execute it together, when all have come
    std::set<uint32_t> come;
    std::set<uint32_t> missing;
  };

  Owners find_owners(uint32_t session, const ContentId& call, const Versions& changed,
                     std::span<const ContentId> made) const;
  void add_owner(uint32_t owner, const ContentId& call, const Share::Version& version,
                 Owners& owners) const;
  bool is_first(uint32_t session, const ContentId& call) const;
  bool is_over(Waiting& waiting, const std::set<uint32_t>& missing) const;
  void forget(uint32_t session, std::vector<Share>& unused);

  Replicas& replicas_;
  mutable std::mutex mutex_;  // everything below; taken before that of the table
  std::unordered_map<uint32_t, std::function<bool()>> members_;
  std::unordered_map<uint32_t, Waiting> waiting_;
  std::list<Gift> gifts_;
  std::atomic<size_t> gifts_left_{0};
  std::set<uint32_t> partners_;  // in the call that is being executed together
  uint32_t holder_ = 0;          // owner of what is given
  uint64_t last_number_ = 0;
  uint64_t failures_ = 0;  // in a row
  uint64_t skipped_ = 0;   // opportunities that are not to be taken
  Figures figures_{};
};

}  // namespace sing
