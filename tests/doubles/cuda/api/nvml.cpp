// NVML: the cards as the driver's management library describes them.
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "device/card.h"

using namespace sing_double;

namespace {

enum Result {
  kSuccess = 0,
  kUninitialized = 1,
  kInvalid = 2,
  kNotSupported = 3,
  kNotFound = 6,
  kInsufficientSize = 7,
  kDriverNotLoaded = 9,
  kLost = 15
};

struct Memory {
  unsigned long long total, free, used;
};

struct MemoryV2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};

struct Process {
  unsigned pid;
  unsigned long long used;
  unsigned instance, compute_instance;
};

struct ProcessV1 {
  unsigned pid;
  unsigned long long used;
};

struct Utilization {
  unsigned gpu, memory;
};

std::atomic<int> users{0};

int index_of(void* handle) { return static_cast<int>(reinterpret_cast<uintptr_t>(handle)) - 1; }

int check(void* handle) {
  if (!users) return kUninitialized;
  const int index = index_of(handle);
  if (index < 0 || index >= static_cast<int>(cards().size())) return kInvalid;
  return cards()[index].state->lost ? kLost : kSuccess;
}

int put(const std::string& text, char* to, unsigned length) {
  if (text.size() >= length) return kInsufficientSize;
  snprintf(to, length, "%s", text.c_str());
  return kSuccess;
}

}  // namespace

extern "C" {

int nvmlInitWithFlags(unsigned) {
  if (cards().empty()) return kDriverNotLoaded;
  if (!users && !open_nodes("nvmlInit")) return kDriverNotLoaded;
  ++users;
  return kSuccess;
}

int nvmlInit_v2() { return nvmlInitWithFlags(0); }

int nvmlShutdown() {
  if (!users) return kUninitialized;
  --users;
  return kSuccess;
}

const char* nvmlErrorString(int result) {
  switch (result) {
    case kSuccess:
      return "Success";
    case kUninitialized:
      return "Uninitialized";
    case kInvalid:
      return "Invalid Argument";
    case kNotSupported:
      return "Not Supported";
    case kNotFound:
      return "Not Found";
    case kDriverNotLoaded:
      return "Driver Not Loaded";
    case kLost:
      return "GPU is lost";
    default:
      return "Unknown Error";
  }
}

int nvmlSystemGetDriverVersion(char* text, unsigned length) { return put("580.00", text, length); }

int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return kSuccess;
}

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = static_cast<unsigned>(cards().size());
  return users ? kSuccess : kUninitialized;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  *handle = reinterpret_cast<void*>(static_cast<uintptr_t>(index) + 1);
  return check(*handle);
}

int nvmlDeviceGetHandleByUUID(const char* uuid, void** handle) {
  for (size_t index = 0; index < cards().size(); ++index) {
    *handle = reinterpret_cast<void*>(index + 1);
    if (cards()[index].uuid == uuid) return check(*handle);
  }
  return kNotFound;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** handle) {
  unsigned domain = 0, number = 0;
  if (sscanf(bus, "%x:%x:", &domain, &number) != 2) return kInvalid;
  return nvmlDeviceGetHandleByIndex_v2(number - 16, handle);
}

int nvmlDeviceGetIndex(void* handle, unsigned* index) {
  *index = static_cast<unsigned>(index_of(handle));
  return check(handle);
}

int nvmlDeviceGetUUID(void* handle, char* text, unsigned length) {
  const int result = check(handle);
  return result ? result : put(cards()[index_of(handle)].uuid, text, length);
}

int nvmlDeviceGetName(void* handle, char* text, unsigned length) {
  const int result = check(handle);
  return result ? result : put(cards()[index_of(handle)].name, text, length);
}

int nvmlDeviceGetComputeMode(void* handle, int* mode) {
  *mode = 0;
  return check(handle);
}

int nvmlDeviceGetMigMode(void*, unsigned*, unsigned*) { return kNotSupported; }

// The files in `dev` stand for the driver's: the daemon must not look for them in /dev.
int nvmlDeviceGetMinorNumber(void*, unsigned*) { return kNotSupported; }

int nvmlDeviceGetCudaComputeCapability(void* handle, int* major, int* minor) {
  *major = 9;
  *minor = 0;
  return check(handle);
}

int nvmlDeviceGetNumGpuCores(void* handle, unsigned* cores) {
  *cores = 132 * 128;
  return check(handle);
}

int nvmlDeviceGetMemoryInfo(void* handle, Memory* memory) {
  if (const int result = check(handle)) return result;
  memory->total = cards()[index_of(handle)].capacity;
  memory->used = std::min<unsigned long long>(memory->total, used(index_of(handle)));
  memory->free = memory->total - memory->used;
  return kSuccess;
}

int nvmlDeviceGetMemoryInfo_v2(void* handle, MemoryV2* memory) {
  Memory plain;
  if (const int result = nvmlDeviceGetMemoryInfo(handle, &plain)) return result;
  memory->total = plain.total;
  memory->reserved = 0;
  memory->free = plain.free;
  memory->used = plain.used;
  return kSuccess;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void* handle, unsigned* count, Process* processes) {
  if (const int result = check(handle)) return result;
  const auto found = uses(index_of(handle));
  const unsigned room = *count;
  *count = static_cast<unsigned>(found.size());
  if (room < found.size()) return kInsufficientSize;
  for (size_t each = 0; each < found.size(); ++each) {
    processes[each] = {static_cast<unsigned>(found[each].pid), found[each].bytes, 0xffffffff,
                       0xffffffff};
  }
  return kSuccess;
}

// The first version of that function, which torch uses to describe a lack of memory.
int nvmlDeviceGetComputeRunningProcesses(void* handle, unsigned* count, ProcessV1* processes) {
  std::vector<Process> found(kProcessesMax);
  auto most = static_cast<unsigned>(found.size());
  if (const int result = nvmlDeviceGetComputeRunningProcesses_v3(handle, &most, found.data())) {
    return result;
  }
  const unsigned room = *count;
  *count = most;
  if (room < most) return kInsufficientSize;
  for (unsigned each = 0; each < most; ++each)
    processes[each] = {found[each].pid, found[each].used};
  return kSuccess;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return kNotSupported; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return kNotSupported; }
int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return kNotSupported; }

int nvmlDeviceGetGraphicsRunningProcesses_v3(void* handle, unsigned* count, Process*) {
  *count = 0;
  return check(handle);
}

int nvmlDeviceGetUtilizationRates(void* handle, Utilization* rates) {
  *rates = {0, 0};
  return check(handle);
}

int nvmlDeviceGetTotalEccErrors(void*, int, int, unsigned long long*) { return kNotSupported; }

}  // extern "C"
