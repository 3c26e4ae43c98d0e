// CUDA's runtime: devices, their properties, and the words of errors.
#include <stdio.h>
#include <string.h>

#include <algorithm>

#include "api/driver.h"
#include "device/card.h"
#include "device/process.h"

using namespace sing_double;

namespace {

struct Words {
  cudaError_t code;
  const char *name, *text;
};

constexpr Words kWords[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
     "an illegal memory access was encountered"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
};

const Words* words_of(cudaError_t code) {
  const auto* found = std::find_if(std::begin(kWords), std::end(kWords),
                                   [=](auto& each) { return each.code == code; });
  return found == std::end(kWords) ? nullptr : found;
}

constexpr int kMajor = 9, kMinor = 0, kProcessors = 132, kWarp = 32, kThreadsMax = 1024;
constexpr int kRuntime = CUDART_VERSION;

}  // namespace

extern "C" {

const char* cudaGetErrorName(cudaError_t code) {
  const Words* words = words_of(code);
  return words ? words->name : "cudaErrorUnknown";
}

const char* cudaGetErrorString(cudaError_t code) {
  const Words* words = words_of(code);
  return words ? words->text : "unrecognized error code";
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = directory().empty() ? 0 : kRuntime;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kRuntime;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  if (const cudaError_t error = start_driver()) return report(error);
  *count = static_cast<int>(visible().size());
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_index();
  return report(start_driver());
}

// Makes the context, as the runtime does since CUDA 12.
cudaError_t cudaSetDevice(int device) {
  if (const cudaError_t error = select(device)) return report(error);
  int card = 0;
  return report(use_card(&card));
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  if (const cudaError_t error = start_driver()) return report(error);
  if (device < 0 || device >= static_cast<int>(visible().size())) {
    return report(cudaErrorInvalidDevice);
  }
  const Card& card = cards()[visible()[device]];
  *found = {};
  snprintf(found->name, sizeof found->name, "%s", card.name.c_str());
  found->totalGlobalMem = card.capacity;
  found->major = kMajor;
  found->minor = kMinor;
  found->multiProcessorCount = kProcessors;
  found->warpSize = kWarp;
  found->maxThreadsPerBlock = kThreadsMax;
  found->maxThreadsPerMultiProcessor = 2 * kThreadsMax;
  found->regsPerBlock = found->regsPerMultiprocessor = 1 << 16;
  found->sharedMemPerBlock = 48 << 10;
  found->sharedMemPerBlockOptin = found->sharedMemPerMultiprocessor = 227 << 10;
  found->l2CacheSize = 50 << 20;
  for (int axis = 0; axis < 3; ++axis) {
    found->maxThreadsDim[axis] = axis < 2 ? kThreadsMax : 64;
    found->maxGridSize[axis] = axis ? 65535 : 0x7fffffff;
  }
  found->unifiedAddressing = found->canMapHostMemory = found->managedMemory = 1;
  found->concurrentKernels = found->ECCEnabled = 1;
  found->pciBusID = 16 + visible()[device];
  found->memoryBusWidth = 5120;
  for (size_t each = 0; each < sizeof found->uuid.bytes; ++each) {
    found->uuid.bytes[each] = card.uuid[4 + each % (card.uuid.size() - 4)];
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp found;
  if (const cudaError_t error = cudaGetDeviceProperties(&found, device)) return error;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = found.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = found.minor;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = found.multiProcessorCount;
      break;
    case cudaDevAttrWarpSize:
      *value = found.warpSize;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = found.maxThreadsPerBlock;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = found.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(found.sharedMemPerBlock);
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(found.sharedMemPerBlockOptin);
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, static_cast<size_t>(length), "0000:%02X:00.0", 16 + visible().at(device));
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return report(start_driver());
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  *found = {};
  found->maxThreadsPerBlock = kThreadsMax;
  found->numRegs = kWarp;
  found->binaryVersion = found->ptxVersion = 10 * kMajor + kMinor;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int,
                                                                   size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *found = driver_function(name);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

}  // extern "C"
