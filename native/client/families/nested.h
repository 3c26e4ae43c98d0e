// Operators of nested tensors in the strided layout: a buffer on the device, and sizes, strides and
// offsets on the host. Torch's CPU functions for them all consist of operators on the buffer or on
// the inner tensors. So these functions run in the client, and the operators they call are sent to
// the worker.
#pragma once

namespace sing::client {

void register_nested();

}  // namespace sing::client
