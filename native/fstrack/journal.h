// The journal: which paths this process has changed.
//
// Everything here may be called from signal handlers, between fork and exec, in a child of vfork,
// and while a lock of libc or the allocator is held: no allocation, no locks, no stdio, buffers on
// the stack. Nothing here fails visibly: a program must not notice that it is tracked.
//
// A note is a NUL, perhaps a state, the resolved path, and two slashes:
//
//   \0/home/ada/a.csv//                    its content or its existence has changed
//   \0=1700000000123456789:42/home/ada/b//  opened for writing; modified then, bytes
//   \0?/home/ada/data//                    too much lies below it: not all of that was noted
//
// Resolved paths hold no two slashes in a row, so a note that was cut short is recognised.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace sing::fstrack {

inline constexpr size_t kPathBytes = 4096;  // PATH_MAX: the kernel takes no longer ones
inline constexpr int64_t kJournalBytesMax = 64 << 20;

// Puts errno back: what we do afterwards is no part of the call.
class KeepErrno {
 public:
  KeepErrno() : value_(errno) {}
  ~KeepErrno() { errno = value_; }
  KeepErrno(const KeepErrno&) = delete;
  KeepErrno& operator=(const KeepErrno&) = delete;

 private:
  const int value_;
};

// Where a file stood when it was opened for writing.
struct Stood {
  int64_t modified_ns;
  uint64_t bytes;
};

// A path, with room around it for what makes it a note.
class Note {
 public:
  char* path() { return bytes_ + kHeadBytes; }
  size_t length() const { return length_; }

  // Says how long the path is that was put at `path()`; a longer one than fits is none.
  void set_length(size_t length) {
    length_ = length < kPathBytes ? length : 0;
    path()[length_] = '\0';
  }

  // Appends "/name"; false, and nothing has changed, if it would not fit.
  bool append(const char* name, size_t length);

  // Writes it to the journal, unless that was done before. True if it is in there.
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

// Puts what changes from now on into another journal. Not for two threads at once, and not twice
// while another thread may still be at writing to the first. False if there is none.
bool follow(const char* path);

// Of the present journal: what one says of a file, the next one may not.
unsigned journal_number();

// Whether this process is tracked.
bool active();

// Things that were done before, by a number that stands for them. It may forget, when there are
// very many; it never remembers what was not put in.
bool is_remembered(uint64_t key);
void remember(uint64_t key);

uint64_t hash(const char* bytes, size_t count);
uint64_t mix(uint64_t key, uint64_t value);

}  // namespace sing::fstrack
