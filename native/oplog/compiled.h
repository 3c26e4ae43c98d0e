// The operators for graphs of torch.compile, defined in both client and worker.
//
// A graph is described by bytes in a storage of the device (kernelproxy/common/graph_format.py), so
// that it is part of the device's state: snapshots contain it, and a worker that does not know a
// graph reads it there and compiles it for its own device. `digest` identifies the bytes.
#pragma once

namespace sing {

inline constexpr char kGraphLibrary[] = "sing";
// Compiles a graph, or raises an error with the reason. The result has no meaning.
inline constexpr char kPrepareGraph[] = "prepare_graph(Tensor graph, str digest) -> Tensor";
// Runs a graph. `changed` are the inputs that it writes to, `numbers` its integer inputs. Results
// may be parts of inputs.
inline constexpr char kRunGraph[] =
    "run_graph(Tensor graph, str digest, Tensor(a!)[] changed, Tensor(b)[] inputs, int[] numbers) "
    "-> Tensor(b)[]";

}  // namespace sing
