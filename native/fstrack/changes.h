// Records in the journal what a successful call has changed.
//
// Paths are resolved by the kernel, through the file's descriptor or that of its directory: links,
// working directories and `..` are resolved as they were for the call itself.
#pragma once

namespace sing::fstrack {

// True if opening with these flags may change a file.
bool may_write(int flags);

// Notes that a file was opened by `path`; `truncated`: it is empty now, whatever it contained.
void note_opened(int fd, const char* path, bool truncated);

// Notes that a file's content or mode was changed through its descriptor.
void note_file(int fd);

// Notes that a directory's entry was made, replaced or removed; does not follow the last part of
// `path`.
void note_entry(int directory, const char* path);

// Notes that the target of `path` was changed.
void note_target(int directory, const char* path);

// Notes that an entry was renamed, and with it everything below it.
void note_renamed(int old_directory, const char* old_path, int new_directory, const char* new_path);

}  // namespace sing::fstrack
