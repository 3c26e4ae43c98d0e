// Contents of storages, as they go with a snapshot to another process of the job.
//
// Note [Moves]. All processes that execute ranks of a job use the same keys for content ids (see
// content.h), so equal contents have equal ids in each of them. A rank that moves to a process with
// other ranks takes along only bytes that are not there:
//   1. The target lists the ids of its versions, and pins them.
//   2. The worker that the rank leaves writes the tables of a snapshot, and the bytes of its
//      storages into a file of their own, except those with these ids and those that the arena has.
//      A third file has the content ids of the rank's storages, and which of them are omitted.
//   3. The target loads the tables. Its own versions take the place of what is omitted. What was
//      carried is not copied again: the file is the memory of the storages from then on.
// Tables of a move are no base of a recovery. The agent keeps the snapshot before, and the log
// after that; the target gets both, and overwrites the extents of neither.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "worker/replicas/replicas.h"
#include "worker/state/arena.h"
#include "worker/state/storages.h"

namespace sing {

// The ids of a target's versions, each with a number of its version.
using KnownContents = std::unordered_map<ContentId, uint64_t>;

// Write into a new memfd, and read what such a file has. Nothing in it is trusted: any ids are
// possible.
int write_known(std::span<const std::pair<ContentId, uint64_t>> ids);
KnownContents read_known(int fd);

struct ContentEntry {
  uint32_t id;       // of the storage
  uint32_t omitted;  // 1: its extent was not written
  ContentId content;
};
static_assert(sizeof(ContentEntry) == 24);

// The contents of a session that is moved, as they are gathered.
class ContentList {
 public:
  explicit ContentList(const KnownContents& known) : known_(known) {}
  // Adds a storage with a known content.
  void add(uint32_t id, const Slot& slot) { add(id, slot, /*omitted=*/false); }
  // The same. Returns true if it is omitted: of storages that would share a version, one is, as
  // those of one session do not share bytes.
  bool omit(uint32_t id, const Slot& slot);
  uint64_t omitted() const noexcept { return omitted_.size(); }
  int write() const;

 private:
  void add(uint32_t id, const Slot& slot, bool omitted);

  const KnownContents& known_;
  std::unordered_set<uint64_t> omitted_;  // versions
  std::vector<ContentEntry> entries_;
};

// The same where they arrive.
class MovedContents {
 public:
  // Takes shares of what is there, for a session. Throws if something that was omitted is not there
  // any more. `carried`: the file of bytes. `checked`: the session's arena, if shares are to be
  // compared with the bytes, which then are there or in the file; or null.
  MovedContents(int fd, const Arena& carried, Replicas& replicas, uint32_t session,
                const Arena* checked);

  // Returns true if the storage is now the owner of a version. Its bytes are `data`, or lie in
  // `extent`, of the file if they were carried.
  bool place(Storages& storages, uint32_t id, uint64_t bytes, std::span<const std::byte> data,
             const Extent& extent, bool carried);
  // Notes the content of a storage that was restored in another way.
  void name(Slot& slot, uint32_t id) const;
  const Arena& carried() const noexcept { return carried_; }

 private:
  const Arena& carried_;
  Replicas& replicas_;
  const Arena* checked_;
  std::unordered_map<uint32_t, ContentId> contents_;
  std::unordered_map<uint32_t, Share> shares_;
};

}  // namespace sing
