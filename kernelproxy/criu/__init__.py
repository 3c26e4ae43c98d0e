"""Kernels as processes that CRIU can save and restore.

A kernel that can be saved runs in a *sandbox*, with its own process ids, mounts and /proc. So it
can be restored beside the process from which it was saved, with the same process ids. Ordinary
users can do this, too: inside the sandbox they have the necessary privileges.

=============  ==================================================================================
`form`         which kind of sandbox works on this machine, found by trying it
`sandbox`      starts one: the program ``sing-sandbox``, from ``native/sandbox``
`criu`         saves the process in a sandbox (dump), and restores it in a new one (restore)
`target`       information about the saved process that its images lack
`images`       content of images: whether they can be restored here, and changes before that
`digests`      of mapped files, which the images leave out
`wire`         reads and writes images: protocol buffers, without a schema
`tender`       process manager of one kernel, in the server that started it
`body`         the process as the kernel manager sees it: always one, even if it is replaced
`switchboard`  ZMQ proxy between the kernel's clients and its process, which may be replaced
`exchange`     its handling of messages; `messages`, the parts of messages that it reads
`sockets`      its two sides; `connection`, their addresses
`forking`      forked children of the server release these resources
=============  ==================================================================================

An ordinary user is the same user inside, with no more privileges than outside.
"""
