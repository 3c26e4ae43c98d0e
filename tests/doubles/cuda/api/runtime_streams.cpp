// CUDA's runtime: streams, events and errors.
#include <string.h>

#include "device/card.h"
#include "device/process.h"

using namespace sing_double;

struct CUevent_st {
  std::shared_ptr<Moment> moment;  // none before it is recorded
  int card = -1;
};

namespace {

cudaError_t fault_of(int card) {
  const Context* context = context_of(card);
  return context ? static_cast<cudaError_t>(context->fault.load()) : cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  int card = 0;
  if (const cudaError_t error = use_card(&card)) return report(error);
  auto* made = new Stream(card, flags, priority);
  Context* context = context_of(card);
  const std::lock_guard<std::mutex> guard(context->mutex);
  context->streams.push_back(made);
  *stream = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  destroy(reinterpret_cast<Stream*>(stream));
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t given) {
  int card = 0;
  if (const cudaError_t error = use_card(&card)) return report(error);
  Stream* stream = stream_of(given, card);
  stream->synchronize();
  return report(fault_of(stream->card));
}

cudaError_t cudaStreamQuery(cudaStream_t given) {
  int card = 0;
  if (const cudaError_t error = use_card(&card)) return report(error);
  Stream* stream = stream_of(given, card);
  if (stream->idle()) return report(fault_of(stream->card));
  return report(cudaErrorNotReady);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t given, cudaEvent_t event, unsigned) {
  int card = 0;
  if (const cudaError_t error = use_card(&card)) return report(error);
  if (event->moment) stream_of(given, card)->wait_for(event->moment);
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t given, int* priority) {
  int card = 0;
  if (const cudaError_t error = use_card(&card)) return report(error);
  *priority = stream_of(given, card)->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  thread_local cudaStreamCaptureMode now = cudaStreamCaptureModeGlobal;
  std::swap(now, *mode);
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t given, cudaHostFn_t function, void* data) {
  int card = 0;
  if (const cudaError_t error = use_card(&card)) return report(error);
  stream_of(given, card)->compute([=] {
    function(data);
    return 0;
  });
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  int card = 0;
  if (const cudaError_t error = use_card(&card)) return report(error);
  synchronize_card(card);
  note("synchronize");
  return report(fault_of(card));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  int card = 0;
  if (const cudaError_t error = use_card(&card)) return report(error);
  *event = new CUevent_st{nullptr, card};
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  int card = 0;
  if (const cudaError_t error = use_card(&card)) return report(error);
  event->moment = stream_of(stream, card)->record();
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (const cudaError_t fault = fault_of(event->card)) return report(fault);
  if (!event->moment) return cudaSuccess;
  const std::lock_guard<std::mutex> guard(event->moment->mutex);
  return event->moment->done ? cudaSuccess : report(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (event->moment) event->moment->wait();
  return report(fault_of(event->card));
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (const cudaError_t fault = fault_of(start->card)) return report(fault);
  if (!start->moment || !end->moment) return report(cudaErrorInvalidResourceHandle);
  for (const cudaEvent_t each : {start, end}) {
    const std::lock_guard<std::mutex> guard(each->moment->mutex);
    if (!each->moment->done) return report(cudaErrorNotReady);
  }
  *milliseconds = static_cast<float>(static_cast<double>(end->moment->ns) -
                                     static_cast<double>(start->moment->ns)) /
                  1e6f;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return take_error(false); }
cudaError_t cudaPeekAtLastError() { return take_error(true); }

}  // extern "C"
