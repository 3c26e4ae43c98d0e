// Refuses, in a sentence, the kinds of tensors that a proxied device does not have yet.
#pragma once

namespace sing::client {

void register_refusals();

}  // namespace sing::client
