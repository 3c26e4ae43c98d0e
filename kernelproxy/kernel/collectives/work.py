"""The result of a collective: a ``Work``, and the future in it.

``Work.wait()`` in C++ neither raises the error of a future nor can be interrupted; the one that is
put in its place in Python does both.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed

from kernelproxy.kernel.collectives.transport.waits import waits

# Not public: a Work as a Python class would not survive its way through the dispatcher.
_wrap: Callable[[torch.futures.Future[Any]], Any] = getattr(
    distributed.distributed_c10d, "_create_work_from_future", None
) or getattr(torch._C._distributed_c10d, "_create_work_from_future")  # noqa: B009


#: Errors of asynchronous calls that no wait has raised yet, with the groups of the calls.
unreported: list[tuple[object, Exception]] = []


def forget(group: object) -> None:
    """Drop the errors of a group that was destroyed: calls of later groups did not fail."""
    unreported[:] = [each for each in unreported if each[0] is not group]


class Completion:
    """A future of tensors of the device, and how it is fulfilled.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        The tensors, or others with the same labels of the device.
    group : Group
        The group of the call.
    """

    def __init__(self, tensors: Sequence[Any], group: object) -> None:
        self._group = group
        devices = {str(tensor.device) for tensor in tensors} or {"cuda:0"}
        self._trigger: torch.futures.Future[Any] = torch.futures.Future(devices=[*devices])
        self._outcome: list[Any] | Exception = []
        self.future: torch.futures.Future[Any] = self._trigger.then(self._conclude)

    def _conclude(self, _: torch.futures.Future[Any]) -> list[Any]:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def settle(self, outcome: list[Any] | Exception) -> None:
        """Complete the future, with tensors or with an error."""
        if isinstance(outcome, Exception):
            unreported.append((self._group, outcome))
        self._outcome = outcome
        self._trigger.set_result(None)

    def work(self) -> Any:
        """Return the work, as kernels return it."""
        return _wrap(self.future).boxed()


def all_of(futures: list[torch.futures.Future[Any]]) -> Any:
    """Return the work that is complete when all futures are."""

    def conclude(done: torch.futures.Future[Any]) -> list[Any]:
        return [tensor for future in done.value() for tensor in future.value()]

    return _wrap(torch.futures.collect_all(futures).then(conclude))


def install() -> None:
    """Let ``Work.wait()`` raise errors and be interrupted, if the work is one of these."""
    original = distributed.Work.wait
    bindings: Any = torch._C._distributed_c10d
    unknown = int(bindings.OpType.UNKNOWN)

    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._get_op_type() != unknown:  # it has not been made from a future
            return original(self, *args, **kwargs)
        try:
            future = self.get_future()
        except RuntimeError:
            return original(self, *args, **kwargs)
        if not future.done():
            done = threading.Event()
            future.add_done_callback(lambda _: done.set())
            with waits.for_collectives():
                done.wait()
        try:
            future.wait()
        except RuntimeError as error:
            unreported.clear()
            raise distributed.DistBackendError(_sentence(str(error))) from None
        return True

    distributed.Work.wait = wait  # type: ignore[method-assign]
    _install_wait_tensor()


def _install_wait_tensor() -> None:
    """Let functional collectives raise errors: they wait in C++."""
    functional: Any = importlib.import_module("torch.distributed._functional_collectives")
    original = functional.wait_tensor

    @functools.wraps(original)
    def wait_tensor(tensor: Any) -> Any:
        with waits.for_collectives():
            found = original(tensor)
        if unreported:
            raise unreported.pop()[1]
        return found

    functional.wait_tensor = wait_tensor


def _sentence(text: str) -> str:
    """Return an error's text without what C++ adds to it."""
    words = text.split("when running the callback: ", 1)[-1].split("\n\nAt:", 1)[0]
    return words.removeprefix("DistBackendError: ")
