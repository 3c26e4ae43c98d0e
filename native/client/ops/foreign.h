// Operators that other libraries register, with compiled kernels for CUDA or without.
//
// Note [Foreign kernels]: a compiled kernel for CUDA reads its operands' addresses, behind which
// there is no memory in this process. The dispatcher prefers it to our fallback, whichever was
// registered first, and to any kernel of ours for the same key that is older. So every operator
// that is defined after torch's own gets a kernel of ours for BackendSelect, the last key before
// those of devices, which nobody else registers: it sends calls with the device's tensors to the
// worker, if the kernel they would reach is compiled, and lets all others pass. Kernels in Python
// and composites pass too: they are made of operators that arrive here again. Compiled ones that
// start a kernel of their own instead are stopped where they ask for addresses: Note [Guarded
// storages]. A library's kernel for an operator of torch comes before ours, too: when libraries
// were loaded, such operators get a kernel that refuses.
#pragma once

namespace sing::client {

// Take note of every operator that is defined from now on. Done once, by connect().
void watch_operators();

// Give the operators noted so far their kernel. Also called by the interpreter's main thread, soon
// after an operator was defined, and after a library was loaded. The caller has the GIL.
void take_over_operators();

}  // namespace sing::client
