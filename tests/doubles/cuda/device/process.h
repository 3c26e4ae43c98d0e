// What the parts of the runtime share: this process's state of the driver, and errors.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "device/stream.h"

namespace sing_double {

// Initialises the driver, as cuInit does. Not 0: there is none, or this process may not use it.
cudaError_t start_driver();
// The cards that this process sees, as numbers of `cards()`.
const std::vector<int>& visible();
// Sees to a context on the current card. Not 0: that failed, or the context is lost.
cudaError_t use_card(int* card);
// Number of the current card, of `cards()`; and its number for this process.
int current_card();
int current_index();
cudaError_t select(int index);

// Keeps an error for cudaGetLastError and returns it.
cudaError_t report(cudaError_t error);
cudaError_t take_error(bool keep);
// A function that the double does not have: named in the log, never silent.
cudaError_t unsupported(const char* name);

Stream* stream_of(cudaStream_t stream, int card);

}  // namespace sing_double
