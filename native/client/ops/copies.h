// Copies between the host and the device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

#include "oplog/codec.h"

namespace sing::client {

// Copies between the host and a whole storage, whose bytes have the name; perhaps one piece.
// `last`: from the device, where the bytes are not used again until they were overwritten.
void copy_named(at::Tensor& to, const at::Tensor& from, const ContentName& name, bool last);

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking);
at::Scalar local_scalar(const at::Tensor& self);

}  // namespace sing::client
