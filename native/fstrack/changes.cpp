#include "fstrack/changes.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <linux/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include <cstring>

#include "fstrack/journal.h"

namespace sing::fstrack {

namespace {

constexpr int kDontSync = 0x4000;  // AT_STATX_DONT_SYNC: cached attributes of a remote file are
                                   // enough
constexpr uint32_t kTypeMask = 0170000, kRegular = 0100000, kDirectory = 0040000;
constexpr int64_t kSecond = 1'000'000'000;

// ---------------------------------------------------------------- asking the kernel

struct Facts {
  bool known = false;
  uint32_t type = 0;
  uint32_t links = 0;
  uint64_t identity = 0;  // of this file, and not of a later file with the same inode
  Stood stood = {};
};

Facts facts(int directory, const char* path, int flags) {
  struct statx found;
  Facts facts;
  constexpr unsigned kWanted = STATX_BASIC_STATS | STATX_BTIME;
  if (syscall(SYS_statx, directory, path, flags | kDontSync, kWanted, &found) != 0) return facts;
  facts.known = true;
  facts.type = found.stx_mode & kTypeMask;
  facts.links = found.stx_nlink;
  const uint64_t device = uint64_t{found.stx_dev_major} << 32 | found.stx_dev_minor;
  uint64_t born = 0;
  if ((found.stx_mask & STATX_BTIME) != 0) {
    born = static_cast<uint64_t>(found.stx_btime.tv_sec) * kSecond + found.stx_btime.tv_nsec;
  }
  facts.identity = mix(mix(device, found.stx_ino), born);
  facts.stood = {found.stx_mtime.tv_sec * kSecond + found.stx_mtime.tv_nsec, found.stx_size};
  return facts;
}

// True if every way of writing to a file changes its modification time. In memory (tmpfs) this does
// not hold for mapped files; for unknown and stacked file systems it is not certain.
bool tells_every_write(int fd) {
  constexpr long kXfs = 0x58465342;
  struct statfs found;
  if (syscall(SYS_fstatfs, fd, &found) != 0) return false;
  const long type = static_cast<long>(found.f_type);
  return type == EXT4_SUPER_MAGIC || type == kXfs || type == BTRFS_SUPER_MAGIC ||
         type == NFS_SUPER_MAGIC;
}

int64_t now_ns() {
  struct timespec now;
  syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
  return now.tv_sec * kSecond + now.tv_nsec;
}

int open_path(int directory, const char* path, int flags) {
  return static_cast<int>(syscall(SYS_openat, directory, path, O_PATH | O_CLOEXEC | flags, 0));
}

void close_path(int fd) { syscall(SYS_close, fd); }

// ---------------------------------------------------------------- resolving

// Resolves a descriptor to the path by which the kernel knows it.
bool resolve_fd(int fd, Note& note) {
  char link[48] = "/proc/thread-self/fd/";  // a thread may have descriptors of its own
  char digits[12];
  size_t count = 0;
  for (unsigned rest = static_cast<unsigned>(fd); count == 0 || rest != 0; rest /= 10) {
    digits[count++] = static_cast<char>('0' + rest % 10);
  }
  char* end = link + std::strlen(link);
  while (count != 0) *end++ = digits[--count];
  *end = '\0';
  const long length = syscall(SYS_readlinkat, AT_FDCWD, link, note.path(), kPathBytes);
  note.set_length(length > 0 ? static_cast<size_t>(length) : 0);
  return note.length() != 0;
}

bool resolve_target(int directory, const char* path, Note& note) {
  const int fd = open_path(directory, path, 0);
  if (fd < 0) return false;
  const bool done = resolve_fd(fd, note);
  close_path(fd);
  return done;
}

bool resolve_working_directory(Note& note) {
  const long length = syscall(SYS_getcwd, note.path(), kPathBytes);  // counts the NUL
  note.set_length(length > 1 ? static_cast<size_t>(length) - 1 : 0);
  return note.length() != 0;
}

// Resolves the directory; leaves the last part as it is: it may be a link, or be gone.
bool resolve_entry(int directory, const char* path, Note& note) {
  size_t end = std::strlen(path);
  while (end > 1 && path[end - 1] == '/') --end;
  size_t start = end;
  while (start > 0 && path[start - 1] != '/') --start;
  const char* name = path + start;
  const size_t length = end - start;
  if (length == 0 || (length <= 2 && name[0] == '.' && name[length - 1] == '.')) {
    return resolve_target(directory, path, note);
  }
  if (start == 0) {
    const bool done =
        directory == AT_FDCWD ? resolve_working_directory(note) : resolve_fd(directory, note);
    return done && note.append(name, length);
  }
  if (start >= kPathBytes) return false;
  std::memcpy(note.path(), path, start);
  note.path()[start] = '\0';
  const int fd = open_path(directory, note.path(), O_DIRECTORY);
  if (fd < 0) return false;
  const bool done = resolve_fd(fd, note);
  close_path(fd);
  return done && note.append(name, length);
}

// ---------------------------------------------------------------- what lies below

constexpr size_t kDepthMax = 64;
constexpr size_t kEntriesMax = 100'000;

struct Entry {  // as getdents64 returns them
  uint64_t inode;
  int64_t next;
  uint16_t bytes;
  uint8_t type;
  char name[];
};

constexpr uint8_t kTypeUnknown = 0, kTypeDirectory = 4, kTypeRegular = 8, kTypeLink = 10;

bool is_dots(const char* name) {
  return name[0] == '.' && (name[1] == '\0' || (name[1] == '.' && name[2] == '\0'));
}

// Walks a directory tree. Reads a directory's entries from the kernel a few at a time, and
// remembers its position. One directory is open at a time, and its parents are reopened at the
// remembered position, so the use of stack and descriptors does not grow with the depth.
class Walk {
 public:
  Walk(Note& here, Note& before) : here_(here), before_(before) {}

  // Notes everything below, by its new and its old path. Returns false if it stopped early.
  bool run() {
    size_t entries = 0;
    while (true) {
      const int fd = open_directory();
      if (fd < 0) return false;
      const Step step = read(fd, entries);
      close_path(fd);
      if (step == Step::refused) return false;
      if (step == Step::down) continue;
      if (depth_ == 0) return true;
      --depth_;
      cut(here_);
      cut(before_);
    }
  }

 private:
  enum class Step { down, up, refused };

  int open_directory() const {
    constexpr int kFlags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    const int fd = static_cast<int>(syscall(SYS_openat, AT_FDCWD, here_.path(), kFlags, 0));
    if (fd >= 0) syscall(SYS_lseek, fd, next_[depth_], SEEK_SET);
    return fd;
  }

  Step read(int fd, size_t& entries) {
    alignas(Entry) char buffer[1024];
    while (true) {
      const long count = syscall(SYS_getdents64, fd, buffer, sizeof(buffer));
      if (count <= 0) return count == 0 ? Step::up : Step::refused;
      for (long at = 0; at < count;) {
        const Entry& entry = *reinterpret_cast<const Entry*>(buffer + at);
        at += entry.bytes;
        next_[depth_] = entry.next;
        if (is_dots(entry.name)) continue;
        if (++entries > kEntriesMax) return Step::refused;
        if (enter(fd, entry)) {
          if (depth_ + 1 == kDepthMax) return Step::refused;
          next_[++depth_] = 0;
          return Step::down;
        }
      }
    }
  }

  // Notes an entry. If it is a directory, enters it and returns true.
  bool enter(int fd, const Entry& entry) {
    uint8_t type = entry.type;
    if (type == kTypeUnknown) {
      const Facts found = facts(fd, entry.name, AT_SYMLINK_NOFOLLOW);
      type = static_cast<uint8_t>(found.type >> 12);  // both use the same values
    }
    if (type != kTypeRegular && type != kTypeDirectory && type != kTypeLink) return false;
    const size_t length = std::strlen(entry.name);
    const bool is_here = here_.append(entry.name, length);
    const bool was_before = before_.append(entry.name, length);
    if (is_here) here_.write_changed();
    if (was_before) before_.write_changed();
    if (is_here && was_before && type == kTypeDirectory) return true;
    if (is_here) cut(here_);
    if (was_before) cut(before_);
    return false;
  }

  static void cut(Note& note) {
    size_t length = note.length();
    while (note.path()[length - 1] != '/') --length;
    note.set_length(length > 1 ? length - 1 : 1);
  }

  Note& here_;
  Note& before_;
  size_t depth_ = 0;
  int64_t next_[kDepthMax] = {};
};

// Not inlined, because of its stack use: renames of directories are rare.
[[gnu::noinline]] void note_below(Note& here, int old_directory, const char* old_path) {
  Note before;
  if (!resolve_entry(old_directory, old_path, before)) return;
  const size_t here_length = here.length(), before_length = before.length();
  if (Walk(here, before).run()) return;
  here.set_length(here_length);
  before.set_length(before_length);
  here.write_incomplete();
  before.write_incomplete();
}

}  // namespace

// ---------------------------------------------------------------- the notes

bool may_write(int flags) {
  if ((flags & O_PATH) != 0) return false;
  return (flags & O_ACCMODE) != O_RDONLY || (flags & (O_TRUNC | O_CREAT)) != 0;
}

void note_opened(int fd, const char* path, bool truncated) {
  const KeepErrno keep;
  const Facts found = facts(fd, "", AT_EMPTY_PATH);
  if (found.known && (found.type != kRegular || found.links == 0)) return;
  uint64_t key = 0;
  if (found.known) {
    // The usual case ends here: this file was opened by this name before.
    key = mix(mix(hash(path, std::strlen(path)), found.identity), truncated ? 1 : 0);
    key = mix(key, journal_number());
    if (is_remembered(key)) return;
  }
  Note note;
  if (!resolve_fd(fd, note)) return;
  // A file that was modified a moment ago may be modified again without a change of its time; this
  // includes a file that this call has made.
  const bool changed = truncated || !found.known || found.stood.modified_ns < 0 ||
                       found.stood.modified_ns > now_ns() - kSecond || !tells_every_write(fd);
  const bool done = changed ? note.write_changed() : note.write_opened(found.stood);
  if (done && key != 0) remember(key);
}

void note_file(int fd) {
  const KeepErrno keep;
  const Facts found = facts(fd, "", AT_EMPTY_PATH);
  if (found.known && ((found.type != kRegular && found.type != kDirectory) || found.links == 0)) {
    return;
  }
  Note note;
  if (resolve_fd(fd, note)) note.write_changed();
}

void note_entry(int directory, const char* path) {
  const KeepErrno keep;
  Note note;
  if (resolve_entry(directory, path, note)) note.write_changed();
}

void note_target(int directory, const char* path) {
  const KeepErrno keep;
  Note note;
  if (resolve_target(directory, path, note)) note.write_changed();
}

void note_renamed(int old_directory, const char* old_path, int new_directory,
                  const char* new_path) {
  const KeepErrno keep;
  note_entry(old_directory, old_path);
  Note note;
  if (!resolve_entry(new_directory, new_path, note)) return;
  note.write_changed();
  const Facts found = facts(AT_FDCWD, note.path(), AT_SYMLINK_NOFOLLOW);
  if (found.type == kDirectory) note_below(note, old_directory, old_path);
}

}  // namespace sing::fstrack
