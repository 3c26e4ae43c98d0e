// Operators that other libraries register, with or without compiled kernels for CUDA.
//
// Note [Foreign kernels]: a compiled kernel for CUDA accesses its operands' addresses, behind which
// there is no memory in this process. The dispatcher prefers such a kernel to our fallback,
// whichever was registered first, and to an older kernel of ours for the same key. So every
// operator that is defined after torch's own gets a kernel of ours for BackendSelect, the last key
// before those of devices, for which no other code registers kernels. It sends calls with the
// device's tensors to the worker if the kernel they would reach is compiled, and lets all others
// pass. Kernels in Python and composites pass too: they consist of operators that arrive here
// again. Compiled composites may launch a kernel of their own, so the worker executes them as a
// whole where that gives the same result: without autograd and autocast. Otherwise they run here,
// and are stopped when they request addresses: Note [Guarded storages]. A library's kernel for an
// operator of torch takes precedence over ours, too: after libraries were loaded, such operators
// get a kernel that refuses.
#pragma once

namespace sing::client {

// Starts to record every newly defined operator. Called once, by connect().
void watch_operators();

// Gives the operators recorded so far their kernel. Also called by the interpreter's main thread,
// soon after an operator was defined and after a library was loaded. The caller holds the GIL.
void take_over_operators();

}  // namespace sing::client
