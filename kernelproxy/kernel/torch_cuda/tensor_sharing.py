"""Sharing of device tensors with other processes: refused, with an error at a visible place.

Torch's pickler for other processes calls ``_share_cuda_``, which raises in the sender: the writer
to a pipe, or the starter of a process. But a queue pickles in a thread of its own, which prints the
error and drops the item, so that the reader would wait forever. So such a thread sends an object
that raises the same error in the reader.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any, NoReturn

from kernelproxy.kernel.torch_cuda.streams import refuse


def install(torch: ModuleType) -> None:
    """Patch the imported `torch`."""

    def shared(self: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse()

    torch.UntypedStorage._share_cuda_ = shared
    reductions = torch.multiprocessing.reductions
    ours = (reductions.reduce_tensor, reductions.reduce_storage)
    for kind, reduce in list(ForkingPickler._extra_reducers.items()):  # type: ignore[attr-defined]
        if reduce in ours:
            ForkingPickler.register(kind, _reducing(reduce))


def _refuse() -> NoReturn:
    refuse("Sharing a device tensor with another process", "a session has one process")


def _reducing(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def reduce(shared: Any) -> Any:
        if shared.device.type == "cuda" and _for_a_queue():
            return _refuse, ()
        return original(shared)

    return reduce


def _for_a_queue() -> bool:
    """True if a queue's feeder thread pickles, which does not report errors to the reader.

    Executors' queues do report them, and fail the task.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is Queue._feed.__code__:  # type: ignore[attr-defined]
            own: bool = frame.f_locals["onerror"] is Queue._on_queue_feeder_error  # type: ignore[attr-defined]
            return own
        frame = frame.f_back  # type: ignore[assignment]
    return False
