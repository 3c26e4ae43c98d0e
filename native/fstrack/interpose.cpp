// Wrappers of the libc functions that open or change files, placed before libc's own.
//
// Each calls the next function of its name and notes the change. In programs that are not tracked,
// the cost is the test of a flag. Files of GPUs are not opened (gpu_files.h).
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "fstrack/changes.h"
#include "fstrack/gpu_files.h"
#include "fstrack/journal.h"

#define SING_EXPORT extern "C" __attribute__((visibility("default")))

namespace sing::fstrack {

namespace {

// The next function of a name, looked up when the library is loaded, or earlier, if the constructor
// of another library runs first. A later lookup would not be safe in a signal handler.
template <class Function>
class Next {
 public:
  explicit constexpr Next(const char* name) : name_(name) {}

  Function* find() {
    void* found = function_.load(std::memory_order_relaxed);
    if (found == nullptr) {
      found = dlsym(RTLD_NEXT, name_);
      function_.store(found, std::memory_order_relaxed);
    }
    return reinterpret_cast<Function*>(found);
  }

  // Calls it; `missing` is the result if this libc has no such function.
  template <class Result, class... Arguments>
  Result call(Result missing, Arguments... arguments) {
    Function* function = find();
    if (function != nullptr) return function(arguments...);
    errno = ENOSYS;
    return missing;
  }

 private:
  const char* const name_;
  std::atomic<void*> function_ = nullptr;
};

FILE* const kNoStream = nullptr;
char* const kNoName = nullptr;

using Open = int(const char*, int, ...);
using OpenAt = int(int, const char*, int, ...);
using CheckedOpen = int(const char*, int);
using CheckedOpenAt = int(int, const char*, int);
using Create = int(const char*, mode_t);
using OpenStream = FILE*(const char*, const char*);
using ReopenStream = FILE*(const char*, const char*, FILE*);
using MakeTemporary = int(char*);
using MakeTemporaryWith = int(char*, int);
using MakeTemporaryWithBoth = int(char*, int, int);
using OneName = int(const char*);
using TwoNames = int(const char*, const char*);
using Rename = int(int, const char*, int, const char*);
using RenameWith = int(int, const char*, int, const char*, unsigned);
using LinkAt = int(int, const char*, int, const char*, int);
using NameAt = int(int, const char*, int);
using ModeAt = int(int, const char*, mode_t);
using ModeAtWith = int(int, const char*, mode_t, int);
using LinkTo = int(const char*, int, const char*);
using Truncate = int(const char*, off_t);
using ModeOf = int(int, mode_t);

// All wrapped functions: type and name.
#define SING_FUNCTIONS(F)               \
  F(Open, open)                         \
  F(Open, open64)                       \
  F(Open, __open)                       \
  F(Open, __open64)                     \
  F(OpenAt, openat)                     \
  F(OpenAt, openat64)                   \
  F(CheckedOpen, __open_2)              \
  F(CheckedOpen, __open64_2)            \
  F(CheckedOpenAt, __openat_2)          \
  F(CheckedOpenAt, __openat64_2)        \
  F(Create, creat)                      \
  F(Create, creat64)                    \
  F(OpenStream, fopen)                  \
  F(OpenStream, fopen64)                \
  F(OpenStream, _IO_fopen)              \
  F(ReopenStream, freopen)              \
  F(ReopenStream, freopen64)            \
  F(MakeTemporary, mkstemp)             \
  F(MakeTemporary, mkstemp64)           \
  F(MakeTemporaryWith, mkostemp)        \
  F(MakeTemporaryWith, mkostemp64)      \
  F(MakeTemporaryWith, mkstemps)        \
  F(MakeTemporaryWith, mkstemps64)      \
  F(MakeTemporaryWithBoth, mkostemps)   \
  F(MakeTemporaryWithBoth, mkostemps64) \
  F(TwoNames, rename)                   \
  F(Rename, renameat)                   \
  F(RenameWith, renameat2)              \
  F(OneName, unlink)                    \
  F(NameAt, unlinkat)                   \
  F(OneName, remove)                    \
  F(OneName, rmdir)                     \
  F(Create, mkdir)                      \
  F(ModeAt, mkdirat)                    \
  F(TwoNames, link)                     \
  F(LinkAt, linkat)                     \
  F(TwoNames, symlink)                  \
  F(LinkTo, symlinkat)                  \
  F(Truncate, truncate)                 \
  F(Truncate, truncate64)               \
  F(Create, chmod)                      \
  F(ModeOf, fchmod)                     \
  F(ModeAtWith, fchmodat)

#define SING_DEFINE_NEXT(type, name) constinit Next<type> next_##name(#name);
SING_FUNCTIONS(SING_DEFINE_NEXT)
constinit Next<char*(char*)> next_mkdtemp("mkdtemp");

__attribute__((constructor(101))) void begin() {
  const KeepErrno keep;
  open_journal();
  read_gpu_files();
#define SING_FIND_NEXT(type, name) next_##name.find();
  SING_FUNCTIONS(SING_FIND_NEXT)
  next_mkdtemp.find();
  dlerror();  // a program must not see the error of our lookup
}

int opened(int fd, const char* path, int flags) {
  if (fd >= 0 && active() && may_write(flags)) note_opened(fd, path, (flags & O_TRUNC) != 0);
  return fd;
}

FILE* opened(FILE* stream, const char* path, const char* mode) {
  if (stream == nullptr || path == nullptr || !active()) return stream;
  const bool truncated = mode[0] == 'w';
  if (truncated || mode[0] == 'a' || std::strchr(mode, '+') != nullptr) {
    note_opened(fileno(stream), path, truncated);
  }
  return stream;
}

// A file was made under a name that did not exist before.
int made(int fd) {
  if (fd >= 0 && active()) note_file(fd);
  return fd;
}

int entry_changed(int result, int directory, const char* path) {
  if (result == 0 && active()) note_entry(directory, path);
  return result;
}

int target_changed(int result, int directory, const char* path) {
  if (result == 0 && active()) note_target(directory, path);
  return result;
}

int renamed(int result, int old_directory, const char* old_path, int new_directory,
            const char* new_path, unsigned flags = 0) {
  if (result != 0 || !active()) return result;
  note_renamed(old_directory, old_path, new_directory, new_path);
  constexpr unsigned kExchange = 2;  // RENAME_EXCHANGE
  if ((flags & kExchange) != 0) note_renamed(new_directory, new_path, old_directory, old_path);
  return result;
}

// The third argument of open, which is there only if the flags say so.
mode_t mode_of(int flags, va_list arguments) {
  const bool makes = (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE;
  return makes ? va_arg(arguments, mode_t) : 0;
}

}  // namespace

}  // namespace sing::fstrack

using namespace sing::fstrack;  // NOLINT: the following names are libc's, not ours

// ---------------------------------------------------------------- opening

#define SING_OPEN(name)                                                  \
  SING_EXPORT int name(const char* path, int flags, ...) {               \
    if (is_denied(path)) return -1;                                      \
    va_list arguments;                                                   \
    va_start(arguments, flags);                                          \
    const mode_t mode = mode_of(flags, arguments);                       \
    va_end(arguments);                                                   \
    return opened(next_##name.call(-1, path, flags, mode), path, flags); \
  }
SING_OPEN(open)
SING_OPEN(open64)
SING_OPEN(__open)
SING_OPEN(__open64)

#define SING_OPENAT(name)                                                           \
  SING_EXPORT int name(int directory, const char* path, int flags, ...) {           \
    if (is_denied(path)) return -1;                                                 \
    va_list arguments;                                                              \
    va_start(arguments, flags);                                                     \
    const mode_t mode = mode_of(flags, arguments);                                  \
    va_end(arguments);                                                              \
    return opened(next_##name.call(-1, directory, path, flags, mode), path, flags); \
  }
SING_OPENAT(openat)
SING_OPENAT(openat64)

// Variants called by programs that were compiled with _FORTIFY_SOURCE.
SING_EXPORT int __open_2(const char* path, int flags) {
  if (is_denied(path)) return -1;
  return opened(next___open_2.call(-1, path, flags), path, flags);
}
SING_EXPORT int __open64_2(const char* path, int flags) {
  if (is_denied(path)) return -1;
  return opened(next___open64_2.call(-1, path, flags), path, flags);
}
SING_EXPORT int __openat_2(int directory, const char* path, int flags) {
  if (is_denied(path)) return -1;
  return opened(next___openat_2.call(-1, directory, path, flags), path, flags);
}
SING_EXPORT int __openat64_2(int directory, const char* path, int flags) {
  if (is_denied(path)) return -1;
  return opened(next___openat64_2.call(-1, directory, path, flags), path, flags);
}

SING_EXPORT int creat(const char* path, mode_t mode) {
  return opened(next_creat.call(-1, path, mode), path, O_WRONLY | O_TRUNC);
}
SING_EXPORT int creat64(const char* path, mode_t mode) {
  return opened(next_creat64.call(-1, path, mode), path, O_WRONLY | O_TRUNC);
}

// Inside libc, fopen does not call the open above.
SING_EXPORT FILE* fopen(const char* path, const char* mode) {
  return opened(next_fopen.call(kNoStream, path, mode), path, mode);
}
SING_EXPORT FILE* fopen64(const char* path, const char* mode) {
  return opened(next_fopen64.call(kNoStream, path, mode), path, mode);
}
SING_EXPORT FILE* _IO_fopen(const char* path, const char* mode) {
  return opened(next__IO_fopen.call(kNoStream, path, mode), path, mode);
}
SING_EXPORT FILE* freopen(const char* path, const char* mode, FILE* stream) {
  return opened(next_freopen.call(kNoStream, path, mode, stream), path, mode);
}
SING_EXPORT FILE* freopen64(const char* path, const char* mode, FILE* stream) {
  return opened(next_freopen64.call(kNoStream, path, mode, stream), path, mode);
}

SING_EXPORT int mkstemp(char* path) { return made(next_mkstemp.call(-1, path)); }
SING_EXPORT int mkstemp64(char* path) { return made(next_mkstemp64.call(-1, path)); }
SING_EXPORT int mkostemp(char* path, int flags) {
  return made(next_mkostemp.call(-1, path, flags));
}
SING_EXPORT int mkostemp64(char* path, int flags) {
  return made(next_mkostemp64.call(-1, path, flags));
}
SING_EXPORT int mkstemps(char* path, int suffix) {
  return made(next_mkstemps.call(-1, path, suffix));
}
SING_EXPORT int mkstemps64(char* path, int suffix) {
  return made(next_mkstemps64.call(-1, path, suffix));
}
SING_EXPORT int mkostemps(char* path, int suffix, int flags) {
  return made(next_mkostemps.call(-1, path, suffix, flags));
}
SING_EXPORT int mkostemps64(char* path, int suffix, int flags) {
  return made(next_mkostemps64.call(-1, path, suffix, flags));
}

// ---------------------------------------------------------------- names

SING_EXPORT int rename(const char* old_path, const char* new_path) noexcept {
  return renamed(next_rename.call(-1, old_path, new_path), AT_FDCWD, old_path, AT_FDCWD, new_path);
}
SING_EXPORT int renameat(int old_directory, const char* old_path, int new_directory,
                         const char* new_path) noexcept {
  return renamed(next_renameat.call(-1, old_directory, old_path, new_directory, new_path),
                 old_directory, old_path, new_directory, new_path);
}
SING_EXPORT int renameat2(int old_directory, const char* old_path, int new_directory,
                          const char* new_path, unsigned flags) noexcept {
  return renamed(next_renameat2.call(-1, old_directory, old_path, new_directory, new_path, flags),
                 old_directory, old_path, new_directory, new_path, flags);
}

SING_EXPORT int unlink(const char* path) noexcept {
  return entry_changed(next_unlink.call(-1, path), AT_FDCWD, path);
}
SING_EXPORT int unlinkat(int directory, const char* path, int flags) noexcept {
  return entry_changed(next_unlinkat.call(-1, directory, path, flags), directory, path);
}
SING_EXPORT int remove(const char* path) noexcept {
  return entry_changed(next_remove.call(-1, path), AT_FDCWD, path);
}
SING_EXPORT int rmdir(const char* path) noexcept {
  return entry_changed(next_rmdir.call(-1, path), AT_FDCWD, path);
}
SING_EXPORT int mkdir(const char* path, mode_t mode) noexcept {
  return entry_changed(next_mkdir.call(-1, path, mode), AT_FDCWD, path);
}
SING_EXPORT int mkdirat(int directory, const char* path, mode_t mode) noexcept {
  return entry_changed(next_mkdirat.call(-1, directory, path, mode), directory, path);
}
SING_EXPORT char* mkdtemp(char* path) noexcept {
  char* made = next_mkdtemp.call(kNoName, path);
  if (made != nullptr && active()) note_entry(AT_FDCWD, made);
  return made;
}
SING_EXPORT int link(const char* old_path, const char* new_path) noexcept {
  return entry_changed(next_link.call(-1, old_path, new_path), AT_FDCWD, new_path);
}
SING_EXPORT int linkat(int old_directory, const char* old_path, int new_directory,
                       const char* new_path, int flags) noexcept {
  return entry_changed(
      next_linkat.call(-1, old_directory, old_path, new_directory, new_path, flags), new_directory,
      new_path);
}
SING_EXPORT int symlink(const char* target, const char* path) noexcept {
  return entry_changed(next_symlink.call(-1, target, path), AT_FDCWD, path);
}
SING_EXPORT int symlinkat(const char* target, int directory, const char* path) noexcept {
  return entry_changed(next_symlinkat.call(-1, target, directory, path), directory, path);
}

// ---------------------------------------------------------------- content and mode, by name

SING_EXPORT int truncate(const char* path, off_t length) noexcept {
  return target_changed(next_truncate.call(-1, path, length), AT_FDCWD, path);
}
SING_EXPORT int truncate64(const char* path, off64_t length) noexcept {
  return target_changed(next_truncate64.call(-1, path, length), AT_FDCWD, path);
}
SING_EXPORT int chmod(const char* path, mode_t mode) noexcept {
  return target_changed(next_chmod.call(-1, path, mode), AT_FDCWD, path);
}
SING_EXPORT int fchmod(int fd, mode_t mode) noexcept {
  const int result = next_fchmod.call(-1, fd, mode);
  if (result == 0 && active()) note_file(fd);
  return result;
}
SING_EXPORT int fchmodat(int directory, const char* path, mode_t mode, int flags) noexcept {
  return target_changed(next_fchmodat.call(-1, directory, path, mode, flags), directory, path);
}

// Called by kernelproxy/kernel/files/tracker.py in a process that continues as another kernel's.
SING_EXPORT int sing_fstrack_follow(const char* journal) noexcept {
  return sing::fstrack::follow(journal) ? 0 : -1;
}
