"""Kernels as processes that CRIU can save and restore.

A kernel that can be saved runs in a *sandbox*, with its own process ids, mounts and /proc. So it
can be restored beside the process from which it was saved, with the same process ids. Ordinary
users can do this, too: inside the sandbox they have the necessary privileges.

=============  ==================================================================================
`mode_probe`   which kind of sandbox works on this machine, found by trying it
`sandbox`      starts one: the program ``sing-sandbox``, from ``native/sandbox``
`criu`         saves the process in a sandbox (dump), and restores it in a new one (restore)
`dump_target`  information about the saved process that its images lack
`images`       content of images: whether they can be restored here, and changes before that
`digests`      of mapped files, which the images leave out
`protobuf`     reads and writes images: protocol buffers, without a schema
=============  ==================================================================================

The process manager of a kernel is in `kernelproxy.kernel_host`, the proxy between its clients and
its process in `kernelproxy.zmq_proxy`.

An ordinary user is the same user inside, with no more privileges than outside.
"""
