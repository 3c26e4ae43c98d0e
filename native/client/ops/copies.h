// Copies between the host and the device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

#include "oplog/codec.h"

namespace sing::client {

// Names what this thread copies from now on, in either direction; an empty name: nothing. A whole
// storage is to be copied, perhaps in pieces.
void name_copies(ContentName name);

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking);
at::Scalar local_scalar(const at::Tensor& self);

}  // namespace sing::client
