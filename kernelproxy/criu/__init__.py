"""Kernels as processes that can be saved and made again, by CRIU.

A kernel that is to be saved runs in a *sandbox*: with numbers of processes, mounts and a /proc of
its own. So it can be restored beside the process that it was saved from, under the same numbers,
and by ordinary users, who have the rights for that only inside.

=============  ==================================================================================
`form`         which kind of sandbox works on this machine, found by trying it
`sandbox`      starts one: the program ``sing-sandbox``, from ``native/sandbox``
`criu`         saves the process in a sandbox (dump), and makes it again in a fresh one (restore)
`target`       what is noted of the process that is saved, besides its images
`images`       what is in the images: whether they can be restored here, and what is changed first
`digests`      of mapped files, which the images leave out
`wire`         reads and writes them: protocol buffers, without a schema
`tender`       has one kernel's process, in the server that started it; carries out orders
`body`         the process as the kernel manager sees it: one, whatever becomes of it
`switchboard`  stands between the kernel's clients and its process, which may go and come
`exchange`     what that does with messages; `messages`, what it understands of them
`sockets`      its two sides; `connection`, where they are
`forking`      children that the server forks keep none of this
=============  ==================================================================================

An ordinary user is the same one inside, with no more rights than outside.
"""
