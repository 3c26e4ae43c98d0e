// Memory of the cards, as one process sees it.
//
// An address on a card cannot be read by the host: it lies in a range without access. The bytes lie
// at a fixed distance, where only copies and kernels of the double look. No address is used twice,
// so the use of freed memory is an error. New memory has a pattern, not zeros.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sing_double::memory {

// Returns an address on a card; nullptr if the card is full.
void* allocate(int card, size_t bytes);
// False if nothing begins there.
bool release(void* address);
// The card of an address; -1 if it is none's.
int card_of(const void* address);
// Where the bytes of memory on a card are, for the double; nullptr if they are not allocated.
char* bytes_at(const void* address, size_t bytes);

// Host memory that the driver knows.
void pin(void* address, size_t bytes);
bool unpin(void* address);
bool is_pinned(const void* address, size_t bytes);

}  // namespace sing_double::memory
