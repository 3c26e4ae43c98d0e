// CUDA's driver: as much of libcuda as programs use that find devices, make a context and allocate.
#include "api/driver.h"

#include <stdio.h>
#include <string.h>

#include <array>
#include <mutex>
#include <string>
#include <utility>

#include "device/card.h"
#include "device/memory.h"
#include "device/process.h"

using namespace sing_double;

namespace {

constexpr int kVersion = CUDART_VERSION, kInvalidValue = 1, kNoContext = 201, kFound = 0;
constexpr int kNotSupported = 801;

// A context of the driver is the number of its card for this process, plus one.
thread_local uintptr_t context_now = 0;

int with_card(int device, int* card) {
  const int before = current_index();
  int error = select(device);
  if (!error) error = use_card(card);
  if (before != device && !error) select(before);
  return error;
}

// Functions that the double lacks, each with its name.
constexpr size_t kMissingMax = 512;
std::array<std::string*, kMissingMax> missing;

template <size_t Number>
int lacking() {
  note("unsupported", *missing[Number]);
  return kNotSupported;
}

template <size_t... Numbers>
constexpr auto lacking_all(std::index_sequence<Numbers...>) {
  return std::array<int (*)(), sizeof...(Numbers)>{lacking<Numbers>...};
}

void* lacking_named(const char* name) {
  static constexpr auto kAll = lacking_all(std::make_index_sequence<kMissingMax>());
  static auto* mutex = new std::mutex;
  const std::lock_guard<std::mutex> guard(*mutex);
  for (size_t number = 0; number < kMissingMax; ++number) {
    if (!missing[number]) missing[number] = new std::string(name);
    if (*missing[number] == name) return reinterpret_cast<void*>(kAll[number]);
  }
  return nullptr;
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return start_driver(); }

int cuDriverGetVersion(int* version) {
  *version = kVersion;
  return 0;
}

int cuDeviceGetCount(int* count) { return cudaGetDeviceCount(count); }

int cuDeviceGet(int* device, int number) {
  *device = number;
  if (const int error = start_driver()) return error;
  return number < 0 || number >= static_cast<int>(visible().size()) ? cudaErrorInvalidDevice : 0;
}

int cuDeviceGetName(char* name, int length, int device) {
  cudaDeviceProp found;
  if (const int error = cudaGetDeviceProperties(&found, device)) return error;
  snprintf(name, static_cast<size_t>(length), "%s", found.name);
  return 0;
}

int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  cudaDeviceProp found;
  const int error = cudaGetDeviceProperties(&found, device);
  *bytes = found.totalGlobalMem;
  return error;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  return cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device);
}

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = 0;
  if (const int error = start_driver()) return error;
  if (device < 0 || device >= static_cast<int>(visible().size())) return cudaErrorInvalidDevice;
  *active = context_of(visible()[static_cast<size_t>(device)]) != nullptr;
  return 0;
}

int cuDevicePrimaryCtxRetain(uintptr_t* context, int device) {
  int card = 0;
  *context = static_cast<uintptr_t>(device) + 1;
  return with_card(device, &card);
}

int cuDevicePrimaryCtxRelease_v2(int) { return 0; }

int cuCtxGetCurrent(uintptr_t* context) {
  *context = context_now;
  // The runtime's current device has a context that is current, too.
  if (!context_now && !start_driver() && context_of(current_card())) {
    *context = static_cast<uintptr_t>(current_index()) + 1;
  }
  return 0;
}

int cuCtxSetCurrent(uintptr_t context) {
  context_now = context;
  return context ? static_cast<int>(select(static_cast<int>(context) - 1)) : 0;
}

int cuCtxGetDevice(int* device) {
  uintptr_t context = 0;
  cuCtxGetCurrent(&context);
  *device = static_cast<int>(context) - 1;
  return context ? 0 : kNoContext;
}

int cuCtxSynchronize() { return cudaDeviceSynchronize(); }

int cuMemAlloc_v2(uintptr_t* address, size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(address), bytes);
}

int cuMemFree_v2(uintptr_t address) { return cudaFree(reinterpret_cast<void*>(address)); }

int cuMemGetInfo_v2(size_t* free_bytes, size_t* total) { return cudaMemGetInfo(free_bytes, total); }

int cuGetErrorString(int code, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(code));
  return 0;
}

int cuGetErrorName(int code, const char** name) {
  *name = cudaGetErrorName(static_cast<cudaError_t>(code));
  return 0;
}

// Private tables of NVIDIA's libraries, which do without them. They call what is missing.
int cuGetExportTable(const void** table, const void*) {
  *table = nullptr;
  return kInvalidValue;
}

int cuGetProcAddress_v2(const char* name, void** found, int, uint64_t, int* result) {
  *found = driver_function(name);
  if (result) *result = kFound;
  return *found ? 0 : kInvalidValue;
}

}  // extern "C"

namespace sing_double {

void* driver_function(const char* name) {
#define HERE(function)                           \
  {                                              \
    #function, reinterpret_cast<void*>(function) \
  }
  static const std::pair<std::string, void*> kHere[] = {
      HERE(cuInit),
      HERE(cuDriverGetVersion),
      HERE(cuDeviceGetCount),
      HERE(cuDeviceGet),
      HERE(cuDeviceGetName),
      HERE(cuDeviceTotalMem_v2),
      HERE(cuDeviceGetAttribute),
      HERE(cuDevicePrimaryCtxGetState),
      HERE(cuDevicePrimaryCtxRetain),
      HERE(cuDevicePrimaryCtxRelease_v2),
      HERE(cuCtxGetCurrent),
      HERE(cuCtxSetCurrent),
      HERE(cuCtxGetDevice),
      HERE(cuCtxSynchronize),
      HERE(cuMemAlloc_v2),
      HERE(cuMemFree_v2),
      HERE(cuMemGetInfo_v2),
      HERE(cuGetErrorString),
      HERE(cuGetErrorName),
      HERE(cuGetExportTable),
      HERE(cuGetProcAddress_v2),
  };
#undef HERE
  for (const auto& [known, function] : kHere) {
    // Newer versions of a function have a suffix that callers do not know.
    if (known == name || known == std::string(name) + "_v2") return function;
  }
  return lacking_named(name);
}

}  // namespace sing_double
