#include "device/process.h"

#include <pthread.h>

#include "device/card.h"

namespace sing_double {
namespace {

struct Driver {
  std::mutex mutex;
  std::atomic<bool> started{false};
  std::vector<int> visible;
};

Driver& driver() {
  static auto* one = new Driver;
  return *one;
}

thread_local int index_now = 0;
thread_local cudaError_t last_error = cudaSuccess;

}  // namespace

cudaError_t start_driver() {
  if (bad_fork) return cudaErrorInitializationError;
  if (driver().started) return driver().visible.empty() ? cudaErrorNoDevice : cudaSuccess;
  const std::lock_guard<std::mutex> guard(driver().mutex);
  if (driver().started) return driver().visible.empty() ? cudaErrorNoDevice : cudaSuccess;
  const std::vector<int> seen = visible_cards();
  if (seen.empty() || !open_nodes("cuInit")) return cudaErrorNoDevice;
  driver().visible = seen;
  driver().started = true;
  pthread_atfork(nullptr, nullptr, [] { bad_fork = true; });
  return cudaSuccess;
}

const std::vector<int>& visible() { return driver().visible; }

int current_index() { return index_now; }

int current_card() { return driver().visible.at(static_cast<size_t>(index_now)); }

cudaError_t select(int index) {
  if (const cudaError_t error = start_driver()) return error;
  if (index < 0 || index >= static_cast<int>(visible().size())) return cudaErrorInvalidDevice;
  index_now = index;
  return cudaSuccess;
}

cudaError_t use_card(int* card) {
  if (const cudaError_t error = start_driver()) return error;
  *card = current_card();
  if (const int error = make_context(*card)) return static_cast<cudaError_t>(error);
  return static_cast<cudaError_t>(context_of(*card)->fault.load());
}

cudaError_t report(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t take_error(bool keep) {
  const cudaError_t found = last_error;
  if (driver().started && !bad_fork) {
    const Context* context = context_of(current_card());
    if (context && context->fault) return static_cast<cudaError_t>(context->fault.load());
  }
  if (!keep) last_error = cudaSuccess;
  return found;
}

cudaError_t unsupported(const char* name) {
  note("unsupported", name);
  return report(cudaErrorNotSupported);
}

Stream* stream_of(cudaStream_t stream, int card) {
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread) {
    return context_of(card)->streams.front();
  }
  return reinterpret_cast<Stream*>(stream);
}

}  // namespace sing_double

extern "C" int cuda_double_lacks(const char* name) { return sing_double::unsupported(name); }
