// CUDA's runtime: the kernels that programs register, and their launches.
#include <cxxabi.h>
#include <string.h>

#include <mutex>
#include <unordered_map>
#include <vector>

#include "device/card.h"
#include "device/fault.h"
#include "device/process.h"
#include "kernels/kernels.h"

using namespace sing_double;

namespace {

struct Registry {
  std::mutex mutex;
  std::vector<std::pair<const void*, const char*>> added;  // by static constructors: thousands
  std::unordered_map<const void*, const char*> names;
};

Registry& registry() {
  static auto* one = new Registry;
  return *one;
}

std::string name_of(const void* function) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> guard(all.mutex);
  for (const auto& [known, name] : all.added) all.names[known] = name;
  all.added.clear();
  const auto found = all.names.find(function);
  if (found == all.names.end()) return "";
  int status = 0;
  char* readable = abi::__cxa_demangle(found->second, nullptr, nullptr, &status);
  const std::string name = readable ? readable : found->second;
  free(readable);
  return name;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};

thread_local std::vector<Configuration> pushed;

cudaError_t launch(const void* function, dim3 grid, void** arguments, cudaStream_t given) {
  int card = 0;
  if (const cudaError_t error = use_card(&card)) return report(error);
  const std::string name = name_of(function);
  Work work = prepare(name, arguments, {grid.x, grid.y, grid.z});
  const int fault = scripted_fault(card, name, arguments);
  if (!work && !fault) return unsupported(name.c_str());
  __atomic_fetch_add(&cards()[card].state->launches, 1, __ATOMIC_RELAXED);
  Stream* stream = stream_of(given, card);
  if (fault) work = [fault] { return fault; };
  stream->compute(std::move(work));
  static const char* blocking = getenv("CUDA_LAUNCH_BLOCKING");
  if (!blocking || *blocking != '1') return cudaSuccess;
  stream->synchronize();
  return report(static_cast<cudaError_t>(context_of(card)->fault.load()));
}

}  // namespace

extern "C" {

// For the library of operators: the next operation of a stream ends with a fault.
void cuda_double_fault(int code, cudaStream_t stream) {
  stream_of(stream, current_card())->compute([code] { return code; });
}

void** __cudaRegisterFatBinary(void*) {
  static void* none = nullptr;
  return &none;
}

void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }

void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  const std::lock_guard<std::mutex> guard(registry().mutex);
  registry().added.emplace_back(function, name);
}

void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  pushed.push_back({grid, block, shared, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Configuration last = pushed.back();
  pushed.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3, void** arguments, size_t,
                               cudaStream_t stream) {
  return launch(kernel, grid, arguments, stream);
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3, void** arguments, size_t,
                             cudaStream_t stream) {
  return launch(function, grid, arguments, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                void** arguments) {
  return launch(function, config->gridDim, arguments, config->stream);
}

}  // extern "C"
