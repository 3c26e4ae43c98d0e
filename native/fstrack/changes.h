// What a call that succeeded has changed, put into the journal.
//
// Paths are resolved by the kernel, through the file's descriptor or that of its directory: links,
// working directories and `..` are settled as they were for the call itself.
#pragma once

namespace sing::fstrack {

// Whether opening with these flags may change a file.
bool may_write(int flags);

// A file was opened by `path`; `truncated` if it is empty now whatever was in it.
void note_opened(int fd, const char* path, bool truncated);

// A file's content or mode was changed through its descriptor.
void note_file(int fd);

// A directory's entry was made, replaced or removed; the last part of `path` is not followed.
void note_entry(int directory, const char* path);

// What `path` leads to was changed.
void note_target(int directory, const char* path);

// An entry has another name, and with it everything below it.
void note_renamed(int old_directory, const char* old_path, int new_directory, const char* new_path);

}  // namespace sing::fstrack
