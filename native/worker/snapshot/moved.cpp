#include "worker/snapshot/moved.h"

#include <sys/mman.h>

#include <stdexcept>

#include "oplog/mapping.h"

namespace sing {

namespace {

struct KnownEntry {
  ContentId content;
  uint64_t version;
};

// More than the storages of any session.
constexpr uint64_t kFileBytesMax = Storages::kCountMax * sizeof(ContentEntry);

template <class Entry>
int write_entries(std::span<const Entry> entries) {
  File file(memfd_create("sing-contents", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.fd() < 0) throw_errno("cannot list contents");
  write_file(file.fd(), 0, std::as_bytes(entries));
  return file.release();
}

template <class Entry>
std::vector<Entry> read_entries(int fd) {
  const uint64_t bytes = file_bytes(fd);
  if (bytes > kFileBytesMax || bytes % sizeof(Entry) != 0) {
    throw std::runtime_error("a list of contents is torn");
  }
  std::vector<Entry> entries(bytes / sizeof(Entry));
  read_file(fd, 0, std::as_writable_bytes(std::span(entries)));
  return entries;
}

}  // namespace

int write_known(std::span<const std::pair<ContentId, uint64_t>> ids) {
  std::vector<KnownEntry> entries;
  entries.reserve(ids.size());
  for (const auto& [content, version] : ids) entries.push_back({content, version});
  return write_entries(std::span<const KnownEntry>(entries));
}

KnownContents read_known(int fd) {
  KnownContents known;
  for (const KnownEntry& entry : read_entries<KnownEntry>(fd)) {
    known.emplace(entry.content, entry.version);
  }
  return known;
}

void ContentList::add(uint32_t id, const Slot& slot, bool omitted) {
  if (slot.life != Slot::Life::live || slot.filled != slot.bytes || !slot.content) return;
  entries_.push_back({id, omitted, slot.content});
}

bool ContentList::omit(uint32_t id, const Slot& slot) {
  const auto found = known_.find(slot.content);
  const bool omitted = slot.life == Slot::Life::live && slot.filled == slot.bytes &&
                       found != known_.end() && omitted_.insert(found->second).second;
  add(id, slot, omitted);
  return omitted;
}

int ContentList::write() const { return write_entries(std::span<const ContentEntry>(entries_)); }

MovedContents::MovedContents(int fd, const Arena& carried, Replicas& replicas, uint32_t session,
                             const Arena* checked)
    : carried_(carried), replicas_(replicas), checked_(checked) {
  std::vector<ContentEntry> entries = read_entries<ContentEntry>(fd);
  for (ContentEntry& entry : entries) {
    if (entry.omitted == 0) continue;
    Share share = replicas.find(entry.content, session);
    if (!share) throw std::runtime_error("what the session shares is not held here any more");
    shares_.insert_or_assign(entry.id, std::move(share));
  }
  // Later, as each version may have one owner in a session.
  for (ContentEntry& entry : entries) {
    if (entry.omitted != 0 || !entry.content) continue;
    if (Share share = replicas.find(entry.content, session)) {
      shares_.try_emplace(entry.id, std::move(share));
    } else {
      contents_.insert_or_assign(entry.id, entry.content);
    }
  }
}

bool MovedContents::place(Storages& storages, uint32_t id, uint64_t bytes,
                          std::span<const std::byte> data, const Extent& extent, bool carried) {
  auto found = shares_.extract(id);
  if (found.empty()) return false;
  Share share = std::move(found.mapped());
  if (share.storage().nbytes() != bytes) {
    throw std::runtime_error("what the session shares has another size here");
  }
  if (checked_) {
    std::vector<std::byte> written(data.begin(), data.end());
    written.resize(bytes);
    const Arena& file = carried ? carried_ : *checked_;
    if (extent) file.read(extent.offset, std::span(written).first(extent.count));
    storages.check_splice(share.storage(), written, "a move");
  }
  storages.bind(id, std::move(share));
  return true;
}

void MovedContents::name(Slot& slot, uint32_t id) const {
  const auto found = contents_.find(id);
  if (found == contents_.end() || slot.bytes == 0) return;
  if (slot.share) {
    replicas_.also(slot.share, found->second, /*of_bytes=*/false);
  } else {
    slot.content = found->second;
    slot.findable = false;
  }
}

}  // namespace sing
