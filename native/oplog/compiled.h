// The operators that stand for graphs of torch.compile, which both sides define.
//
// A graph is described by bytes in a storage of the device (kernelproxy/common/graph_format.py), so
// that it is part of the device's state: snapshots have it, and a worker that meets a graph it does
// not know reads it there and compiles it for its own device. `digest` names the bytes.
#pragma once

namespace sing {

inline constexpr char kGraphLibrary[] = "sing";
// Compiles a graph, or says why that cannot be done. What it returns means nothing.
inline constexpr char kPrepareGraph[] = "prepare_graph(Tensor graph, str digest) -> Tensor";
// Runs a graph. `changed` are the inputs that it writes to, `numbers` its integer inputs. Results
// may be parts of inputs.
inline constexpr char kRunGraph[] =
    "run_graph(Tensor graph, str digest, Tensor(a!)[] changed, Tensor(b)[] inputs, int[] numbers) "
    "-> Tensor(b)[]";

}  // namespace sing
