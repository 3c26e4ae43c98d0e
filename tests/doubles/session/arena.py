"""A session's arena without a worker: ranges of bytes in a memfd."""

from __future__ import annotations

import os
from collections.abc import Callable

from kernelproxy.storage.manifest import Extent

MakeArena = Callable[..., "Arena"]


class Arena:
    """A memfd with ranges of bytes, like an agent's."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("arena", os.MFD_CLOEXEC)
        self.extents: list[Extent] = []
        self._end = 0

    def add(self, raw: bytes, version: int = 0) -> Extent:
        extent = Extent(self._end, len(raw), version)
        self.write(raw, extent.offset)
        self._end += -(-len(raw) // 4096) * 4096
        self.extents.append(extent)
        return extent

    def write(self, raw: bytes, offset: int) -> None:
        os.pwrite(self.fd, raw, offset)

    def read(self, extent: Extent) -> bytes:
        return os.pread(self.fd, extent.count, extent.offset)
