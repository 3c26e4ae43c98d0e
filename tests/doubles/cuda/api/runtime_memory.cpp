// CUDA's runtime: memory and copies.
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "device/card.h"
#include "device/memory.h"
#include "device/process.h"

using namespace sing_double;

namespace {

constexpr int kIllegalAddress = cudaErrorIllegalAddress;

enum class Place { card, pinned, pageable };

Place place_of(const void* address, size_t bytes) {
  if (memory::card_of(address) >= 0) return Place::card;
  return memory::is_pinned(address, bytes) ? Place::pinned : Place::pageable;
}

// Copies now. Addresses on cards are checked here, when the copy is executed, as on hardware.
int copy_now(void* to, Place to_place, const void* from, Place from_place, size_t bytes) {
  void* target = to_place == Place::card ? memory::bytes_at(to, bytes) : to;
  const void* source = from_place == Place::card ? memory::bytes_at(from, bytes) : from;
  if (!target || !source) return kIllegalAddress;
  memmove(target, source, bytes);
  return 0;
}

// Memory that is not pinned is read before the call returns, and written before it returns.
cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t given, bool wait) {
  int card = 0;
  if (const cudaError_t error = use_card(&card)) return report(error);
  if (!bytes) return cudaSuccess;
  const Place to_place = place_of(to, bytes), from_place = place_of(from, bytes);
  Stream* stream = stream_of(given, card);
  if (from_place == Place::pageable && to_place == Place::card) {
    const auto* source = static_cast<const char*>(from);
    auto staged = std::make_shared<std::vector<char>>(source, source + bytes);
    stream->compute([=] { return copy_now(to, to_place, staged->data(), Place::pageable, bytes); });
  } else {
    stream->compute([=] { return copy_now(to, to_place, from, from_place, bytes); });
  }
  if (wait || to_place == Place::pageable) stream->synchronize();
  return report(static_cast<cudaError_t>(context_of(card)->fault.load()));
}

cudaError_t fill(void* to, int value, size_t bytes, cudaStream_t given, bool wait) {
  int card = 0;
  if (const cudaError_t error = use_card(&card)) return report(error);
  Stream* stream = stream_of(given, card);
  stream->compute([=] {
    char* target = memory::bytes_at(to, bytes);
    if (bytes && !target) return kIllegalAddress;
    if (bytes) memset(target, value, bytes);
    return 0;
  });
  if (wait) stream->synchronize();
  return report(static_cast<cudaError_t>(context_of(card)->fault.load()));
}

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** address, size_t bytes) {
  int card = 0;
  if (const cudaError_t error = use_card(&card)) return report(error);
  *address = bytes ? memory::allocate(card, bytes) : nullptr;
  return *address || !bytes ? cudaSuccess : report(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void* address) {
  int card = 0;
  if (const cudaError_t error = use_card(&card)) return report(error);
  if (!address) return cudaSuccess;
  const int owner = memory::card_of(address);
  if (owner < 0) return report(cudaErrorInvalidValue);
  synchronize_card(owner);
  return memory::release(address) ? cudaSuccess : report(cudaErrorInvalidValue);
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  int card = 0;
  if (const cudaError_t error = use_card(&card)) return report(error);
  *total = cards()[card].capacity;
  *free_bytes = *total - std::min(*total, static_cast<size_t>(used(card)));
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  int card = 0;
  if (const cudaError_t error = use_card(&card)) return report(error);
  *address = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (!*address) return report(cudaErrorMemoryAllocation);
  memory::pin(*address, bytes);
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void** address, size_t bytes) {
  return cudaHostAlloc(address, bytes, 0);
}

cudaError_t cudaFreeHost(void* address) {
  int card = 0;
  if (const cudaError_t error = use_card(&card)) return report(error);
  if (!address) return cudaSuccess;
  synchronize_card(card);
  if (!memory::unpin(address)) return report(cudaErrorInvalidValue);
  free(address);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  int card = 0;
  if (const cudaError_t error = use_card(&card)) return report(error);
  if (memory::is_pinned(address, 1)) return report(cudaErrorHostMemoryAlreadyRegistered);
  memory::pin(address, bytes);
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* address) {
  return memory::unpin(address) ? cudaSuccess : report(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  if (const cudaError_t error = start_driver()) return report(error);
  *attributes = {};
  const int card = memory::card_of(address);
  if (card >= 0) {
    attributes->type = cudaMemoryTypeDevice;
    const auto found = std::find(visible().begin(), visible().end(), card);
    attributes->device = static_cast<int>(found - visible().begin());
    attributes->devicePointer = const_cast<void*>(address);
  } else if (memory::is_pinned(address, 1)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->hostPointer = attributes->devicePointer = const_cast<void*>(address);
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return copy(to, from, bytes, nullptr, true);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  return copy(to, from, bytes, stream, false);
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return fill(to, value, bytes, nullptr, false);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return fill(to, value, bytes, stream, false);
}

}  // extern "C"
