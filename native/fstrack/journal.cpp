#include "fstrack/journal.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

namespace sing::fstrack {

namespace {

constexpr size_t kSlots = 1 << 15;
constexpr size_t kProbes = 8;
constexpr char kVariable[] = "SING_FSTRACK=";

// The first path is written before there is a second thread, the other one before it becomes
// current.
constinit char journals[2][kPathBytes] = {};
constinit std::atomic<unsigned> current{0};
static_assert(std::atomic<unsigned>::is_always_lock_free);
constinit bool tracked = false;

const char* journal(unsigned number) { return journals[number % 2]; }

// Unused pages of it take no memory. A relaxed word per slot is enough: a missed entry is only
// noted twice, and a child of vfork, which shares the table, has already written what it adds.
constinit std::atomic<uint64_t> slots[kSlots] = {};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

bool begins_with(const char* text, const char* start) {
  return std::strncmp(text, start, std::strlen(start)) == 0;
}

// True for paths of in-memory file systems, and for the journal itself.
bool is_ignored(const char* path) {
  return begins_with(path, "/dev/") || begins_with(path, "/proc/") || begins_with(path, "/sys/") ||
         std::strcmp(path, journal(journal_number())) == 0;
}

// Writes a number in front of `end`; returns its start.
char* put_number(char* end, uint64_t value) {
  do {
    *--end = static_cast<char>('0' + value % 10);
    value /= 10;
  } while (value != 0);
  return end;
}

// A single write, so that the notes of several processes do not mix. The file is opened each time:
// the program could close a kept descriptor, and its number could then belong to another file.
bool append_to_journal(unsigned number, const char* bytes, size_t count) {
  constexpr int kFlags = O_WRONLY | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY;
  const long fd = syscall(SYS_openat, AT_FDCWD, journal(number), kFlags, 0);
  if (fd < 0) return false;
  // A full journal is recognised by its length; retrying with every call would only cost time.
  bool done = syscall(SYS_lseek, fd, 0, SEEK_END) >= kJournalBytesMax;
  if (!done) {
    long written;
    do {
      written = syscall(SYS_write, fd, bytes, count);
    } while (written < 0 && errno == EINTR);
    done = written == static_cast<long>(count);
  }
  syscall(SYS_close, fd);
  return done;
}

}  // namespace

unsigned journal_number() { return current.load(std::memory_order_acquire); }

void open_journal() {
  const size_t prefix = sizeof(kVariable) - 1;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    if (!begins_with(*entry, kVariable)) continue;
    const char* path = *entry + prefix;
    const size_t length = std::strlen(path);
    if (path[0] != '/' || length >= kPathBytes) return;
    std::memcpy(journals[0], path, length + 1);
    tracked = true;
    return;
  }
}

bool follow(const char* path) {
  const size_t length = std::strlen(path);
  if (!tracked || path[0] != '/' || length >= kPathBytes) return false;
  const unsigned next = current.load(std::memory_order_relaxed) + 1;
  std::memcpy(journals[next % 2], path, length + 1);
  current.store(next, std::memory_order_release);
  return true;
}

bool active() { return tracked; }

bool Note::append(const char* name, size_t length) {
  if (length_ == 0 || length_ + 1 + length >= kPathBytes) return false;
  char* end = path() + length_;
  if (length_ > 1) *end++ = '/';  // the root already ends with one
  std::memcpy(end, name, length);
  set_length(static_cast<size_t>(end - path()) + length);
  return true;
}

bool Note::write(char sign, const Stood* stood) {
  if (length_ == 0 || path()[0] != '/') return false;
  if (is_ignored(path())) return true;
  const unsigned number = journal_number();
  const uint64_t about = mix(hash(path(), length_), static_cast<unsigned char>(sign));
  const uint64_t key = mix(about, number);
  if (is_remembered(key)) return true;
  char* start = path();
  if (stood != nullptr) {
    start = put_number(start, stood->bytes);
    *--start = ':';
    start = put_number(start, static_cast<uint64_t>(stood->modified_ns));
  }
  if (sign != '\0') *--start = sign;
  *--start = '\0';
  char* end = path() + length_;
  end[0] = end[1] = '/';
  const bool done = append_to_journal(number, start, static_cast<size_t>(end + 2 - start));
  end[0] = '\0';
  if (done) remember(key);
  return done;
}

bool is_remembered(uint64_t key) {
  for (size_t probe = 0; probe < kProbes; ++probe) {
    const uint64_t found = slots[(key + probe) % kSlots].load(std::memory_order_relaxed);
    if (found == key) return true;
    if (found == 0) return false;
  }
  return false;
}

void remember(uint64_t key) {
  for (size_t probe = 0; probe < kProbes; ++probe) {
    std::atomic<uint64_t>& slot = slots[(key + probe) % kSlots];
    if (slot.load(std::memory_order_relaxed) == 0) {
      slot.store(key, std::memory_order_relaxed);
      return;
    }
  }
  slots[key % kSlots].store(key, std::memory_order_relaxed);
}

uint64_t hash(const char* bytes, size_t count) {
  uint64_t value = 0xcbf29ce484222325;  // FNV-1a
  for (size_t i = 0; i < count; ++i) {
    value = (value ^ static_cast<unsigned char>(bytes[i])) * 0x100000001b3;
  }
  return mix(value, count);
}

uint64_t mix(uint64_t key, uint64_t value) {
  key = (key ^ value) + 0x9e3779b97f4a7c15;  // splitmix64
  key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9;
  key = (key ^ (key >> 27)) * 0x94d049bb133111eb;
  key ^= key >> 31;
  return key != 0 ? key : 1;  // 0 is an empty slot
}

}  // namespace sing::fstrack
