// Graphs of torch.compile: the operators by which activation/compiling.py ships and runs them.
#pragma once

namespace sing::client {

void register_graphs();

}  // namespace sing::client
