// Graphs of torch.compile: the operators by which kernel/activation/inductor_backend.py sends and
// runs them.
#pragma once

namespace sing::client {

void register_graphs();

}  // namespace sing::client
