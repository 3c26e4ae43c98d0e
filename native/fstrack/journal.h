// The journal: paths that this process has changed.
//
// Everything here may be called from signal handlers, between fork and exec, in a child of vfork,
// and while a lock of libc or the allocator is held: no allocation, no locks, no stdio, buffers on
// the stack. Nothing here fails visibly: a program must not notice that it is tracked.
//
// A note is a NUL, perhaps a state, the resolved path, and two slashes:
//
//   \0/home/ada/a.csv//                    its content or its existence has changed
//   \0=1700000000123456789:42/home/ada/b//  opened for writing; modification time and size then
//   \0?/home/ada/data//                    too many entries below it: not all of them were noted
//
// Resolved paths hold no two slashes in a row, so a truncated note is recognised.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace sing::fstrack {

inline constexpr size_t kPathBytes = 4096;  // PATH_MAX: the kernel accepts no longer paths
inline constexpr int64_t kJournalBytesMax = 64 << 20;

// Restores errno at the end: what is done after the call must not change it.
class KeepErrno {
 public:
  KeepErrno() : value_(errno) {}
  ~KeepErrno() { errno = value_; }
  KeepErrno(const KeepErrno&) = delete;
  KeepErrno& operator=(const KeepErrno&) = delete;

 private:
  const int value_;
};

// State of a file when it was opened for writing.
struct Stood {
  int64_t modified_ns;
  uint64_t bytes;
};

// A path, with space around it for the other parts of a note.
class Note {
 public:
  char* path() { return bytes_ + kHeadBytes; }
  size_t length() const { return length_; }

  // Sets the length of the path that was written to `path()`; a path that does not fit becomes
  // empty.
  void set_length(size_t length) {
    length_ = length < kPathBytes ? length : 0;
    path()[length_] = '\0';
  }

  // Appends "/name". Returns false, and changes nothing, if it would not fit.
  bool append(const char* name, size_t length);

  // Writes it to the journal, unless that was done before. Returns true if the journal contains it.
  bool write_changed() { return write('\0', nullptr); }
  bool write_opened(const Stood& stood) { return write('=', &stood); }
  bool write_incomplete() { return write('?', nullptr); }

 private:
  static constexpr size_t kHeadBytes = 48;  // NUL, sign, two numbers of up to 20 digits, colon
  static constexpr size_t kTailBytes = 3;

  bool write(char sign, const Stood* stood);

  size_t length_ = 0;
  char bytes_[kHeadBytes + kPathBytes + kTailBytes];
};

// Reads SING_FSTRACK. Called when the library is loaded.
void open_journal();

// Directs later notes to another journal. Not thread-safe, and not to be called twice while another
// thread may still be writing to the first journal. Returns false if this process is not tracked.
bool follow(const char* path);

// Number of the current journal: a file noted in one journal may be missing in the next.
unsigned journal_number();

// True if this process is tracked.
bool active();

// Cache of finished work, by hash keys. It may forget entries when there are very many; it never
// reports a key that was not added.
bool is_remembered(uint64_t key);
void remember(uint64_t key);

uint64_t hash(const char* bytes, size_t count);
uint64_t mix(uint64_t key, uint64_t value);

}  // namespace sing::fstrack
