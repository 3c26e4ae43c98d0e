// Refuses, with a one-sentence error, the kinds of tensors that a proxied device does not support
// yet.
#pragma once

namespace sing::client {

void register_refusals();

}  // namespace sing::client
