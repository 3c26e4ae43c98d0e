"""NCCL's names in torch, so that programs need not name another backend.

The backend of a group is only a carrier, torch's ``FakeProcessGroup``: calls on a group go through
the dispatcher, to `kernels`, before they reach a backend. So the kernels serve groups of other
backends, too, such as gloo, which accepts CUDA tensors in builds with CUDA.
"""

from __future__ import annotations

import functools
import sys
from datetime import timedelta
from types import ModuleType
from typing import Any

#: The NCCL whose behaviour is imitated; torch 2.13 has it.
VERSION = (2, 29, 7)
_TIMEOUT = timedelta(minutes=10)


def install(torch: ModuleType) -> None:
    """Let `torch` have NCCL; the kernels are registered when the first group is made."""
    c10d = torch.distributed.distributed_c10d
    carrier = torch._C._distributed_c10d.FakeProcessGroup
    nccl = _backend(carrier)
    c10d._NCCL_AVAILABLE = True
    c10d.ProcessGroupNCCL = torch.distributed.ProcessGroupNCCL = nccl
    c10d.default_pg_nccl_timeout = _TIMEOUT
    torch.cuda.nccl.version = lambda: VERSION
    torch.cuda.nccl.is_available = lambda tensors: False  # for collectives of one process
    # Torch calls these on a backend of NCCL; they have no effect here.
    for name in ("_set_sequence_number_for_group", "_group_start", "_group_end"):
        setattr(carrier, name, lambda self: None)
    for name in ("_set_default_timeout", "_add_ephemeral_timeout"):
        setattr(carrier, name, lambda self, timeout: None)
    carrier.uid = property(lambda self: -1)
    _patch_groups(torch, c10d)


def _backend(carrier: type) -> type:
    class Meta(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, carrier)

    class ProcessGroupNCCL(metaclass=Meta):
        """The backend "nccl" of a proxied device."""

        class Options:
            """Options of a group; none has an effect."""

            def __init__(self, is_high_priority_stream: bool = False) -> None:
                self.is_high_priority_stream = is_high_priority_stream
                self.config = NCCLConfig()
                self.global_ranks_in_group: list[int] = []
                self.group_name = ""
                self.split_from: Any = None
                self.split_color = 0
                self._timeout = _TIMEOUT

        def __new__(cls, store: Any, rank: int, size: int, *options: Any) -> Any:
            make: Any = carrier
            return make._create_internal(rank, size)

    class NCCLConfig:
        """Configuration of a communicator: any attribute, without effect."""

    ProcessGroupNCCL.NCCLConfig = NCCLConfig  # type: ignore[attr-defined]
    ProcessGroupNCCL.__module__ = "torch.distributed.distributed_c10d"
    return ProcessGroupNCCL


def _patch_groups(torch: ModuleType, c10d: Any) -> None:
    original = c10d._new_process_group_helper

    @functools.wraps(original)
    def new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
        made, store = original(*args, **kwargs)
        if store is not None:  # this process is a member
            _kernels()[0].announce(made, store)
        return made, store

    @functools.wraps(c10d.split_group)
    def split_group(
        parent_pg: Any = None,
        split_ranks: list[list[int]] | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        backend: Any = None,
    ) -> Any:
        """Make a new group of this rank's part: there is no communicator to split."""
        if not split_ranks:
            raise ValueError("split_ranks cannot be None or empty")
        parent = parent_pg or c10d._get_default_group()
        members = c10d.get_process_group_ranks(parent)
        mine = [part for part in split_ranks if parent.rank() in part]
        if not mine:
            return None
        return c10d.new_group(
            [members[rank] for rank in sorted(mine[0])],
            timeout=timeout,
            backend=backend or c10d.get_backend_config(parent),
            use_local_synchronization=True,
            group_desc=group_desc,
        )

    c10d._new_process_group_helper = new_process_group_helper
    for name in ("", ".distributed_c10d", ".device_mesh"):
        if module := sys.modules.get(f"torch.distributed{name}"):
            setattr(module, "split_group", split_group)  # noqa: B010


@functools.cache
def _kernels() -> Any:
    # Programs without process groups need none of this.
    from kernelproxy.kernel.collectives import kernels, launch, work

    work.install()
    return launch, kernels.install()
