"""Base classes of ``torch.cuda.Stream`` and ``Event``, on torch's generic ones.

A session executes in one order, so streams are only names: work on two of them is not reordered,
and waiting for one waits for everything issued before. Events are real: they are recorded in the
log, complete when the device reaches them, and measure the time between two points of execution.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NoReturn

REFUSED = "{} is not available behind a device proxy: {}."
CUDA = 1  # c10::DeviceType::CUDA
_URGENT = 32  # the bit of a stream's id for high priority, see device.cpp


def refuse(what: str, why: str) -> NoReturn:
    """Raise the user-facing error for something that cannot work here.

    Raises
    ------
    RuntimeError
        Always.
    """
    raise RuntimeError(REFUSED.format(what, why))


def stream_base(c: ModuleType) -> type:
    """Return ``torch._C._CudaStreamBase`` for the extension module `c`."""

    class CudaStreamBase(c.Stream):  # type: ignore[misc, name-defined]
        def __new__(
            cls,
            priority: int = 0,
            stream_id: int = 0,
            device_index: int = 0,
            device_type: int = 0,
            stream_ptr: int = 0,
        ) -> Any:
            if stream_ptr:
                refuse("An external CUDA stream", "it belongs to another library in this process")
            if stream_id or device_index or device_type:
                return super().__new__(
                    cls, stream_id=stream_id, device_index=device_index, device_type=CUDA
                )
            return super().__new__(cls, device=c.device("cuda", 0), priority=priority)

        @property
        def cuda_stream(self) -> int:
            return int(self.stream_id)

        @property
        def priority(self) -> int:
            return -1 if self.stream_id >> _URGENT & 1 else 0

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -1

    return CudaStreamBase


def event_base(c: ModuleType) -> type:
    """Return ``torch._C._CudaEventBase`` for the extension module `c`."""

    class CudaEventBase(c.Event):  # type: ignore[misc, name-defined]
        # A torch.Event for isinstance(), but `_event` is the one that is recorded: torch measures
        # time only between events of exactly that type, not between subclasses.
        _event: Any

        def __new__(
            cls,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> Any:
            if interprocess:
                refuse("An interprocess CUDA event", "the device belongs to this process alone")
            device = c.device("cuda", 0)
            made = super().__new__(cls, device=device)
            made._event = c.Event(device=device, enable_timing=enable_timing, blocking=blocking)
            return made

        def record(self, stream: Any = None) -> None:
            self._event.record(stream)

        def wait(self, stream: Any = None) -> None:
            self._event.wait(stream)

        def query(self) -> bool:
            return bool(self._event.query())

        def synchronize(self) -> None:
            self._event.synchronize()

        def elapsed_time(self, end_event: Any) -> float:
            return float(self._event.elapsed_time(getattr(end_event, "_event", end_event)))

        @property
        def event_id(self) -> int:
            return int(self._event.event_id)

        @property
        def cuda_event(self) -> int:
            return int(self._event.event_id)

        @classmethod
        def from_ipc_handle(cls, device: Any, handle: bytes) -> Any:
            refuse("An interprocess CUDA event", "the device belongs to this process alone")

        def ipc_handle(self) -> bytes:
            refuse("An interprocess CUDA event", "the device belongs to this process alone")

    return CudaEventBase
