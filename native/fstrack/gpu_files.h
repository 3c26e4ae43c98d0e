// Files of GPUs, which a kernel and its children may not open: only workers use GPUs.
//
// SING_GPU_FILES has the beginnings of their paths, separated by colons. Without it, nothing is
// denied. This is no protection against programs that want to get around it: they can make system
// calls themselves, or remove this library from their environment.
#pragma once

namespace sing::fstrack {

// Reads SING_GPU_FILES. Called when the library is loaded.
void read_gpu_files();

// True if this process may not open a file; sets errno. Files that do not exist are not denied, so
// that a program gets the usual error where there is no GPU.
bool is_denied(const char* path);

}  // namespace sing::fstrack
