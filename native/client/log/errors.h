// Errors of the worker, raised as the exceptions that torch raises for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace sing::client {

// "1.50 MiB", as CUDA's caching allocator writes sizes.
std::string as_size(uint64_t bytes);

[[noreturn]] void raise_out_of_memory(const std::string& message);

// Raises the error that an answer of the worker holds.
[[noreturn]] void raise_answer(std::span<const std::byte> bytes);

}  // namespace sing::client
