"""Cards of the double: their directory, what the processes did with them, and scripted faults."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

#: Fatal codes of CUDA.
ILLEGAL_ADDRESS, ASSERT, ECC, LAUNCH_FAILURE = 700, 710, 214, 719

_NVML = """
import json, pynvml
pynvml.nvmlInit()
handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
print(json.dumps([
    [pynvml.nvmlDeviceGetMemoryInfo(each).used,
     {p.pid: p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(each)}]
    for each in handles
]))
"""


class _CardSlot(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_int32),
        ("started", ctypes.c_uint64),
        ("context", ctypes.c_uint64),
        ("memory", ctypes.c_uint64),
    ]


class _CardState(ctypes.Structure):
    """`State` of card.h."""

    _fields_ = [
        ("outside", ctypes.c_uint64),
        ("hidden", ctypes.c_uint64),
        ("busy_ns", ctypes.c_uint64),
        ("launches", ctypes.c_uint64),
        ("lost", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("fired", ctypes.c_uint32 * 32),
        ("slots", _CardSlot * 64),
    ]


@dataclass(frozen=True)
class Event:
    """A line of the log: what a process did, its command line then, and details."""

    what: str
    pid: int
    command: str
    details: str


@dataclass(frozen=True)
class NvmlView:
    """A card in the words of NVML: all bytes in use, and the bytes of each process."""

    used: int
    processes: dict[int, int]


class Cards:
    """A machine's cards, in a directory that the processes find by ``CUDA_DOUBLE``.

    Parameters
    ----------
    directory : Path
    runtime : Path
        Library that `build` has built.
    memory : list of int
        Bytes of each card.
    context : int
        Bytes that a process's context takes.
    operators : Path, optional
        Library that `build_operators` has built: it computes torch's operators whose kernels the
        double does not know. Without it they fail.
    """

    def __init__(
        self,
        directory: Path,
        runtime: Path,
        memory: list[int],
        context: int,
        operators: Path | None = None,
    ) -> None:
        self.directory, self.memory, self.context = directory, memory, context
        (directory / "dev").mkdir(parents=True)
        (directory / "dev" / "nvidiactl").touch()
        lines = []
        for number, size in enumerate(memory):
            (directory / "dev" / f"nvidia{number}").touch()
            self._state_path(number).write_bytes(bytes(ctypes.sizeof(_CardState)))
            lines.append(f"{self.uuid(number)} {size} {context} Double {number}\n")
        (directory / "cards").write_text("".join(lines))
        search = [str(runtime.parent), os.environ.get("LD_LIBRARY_PATH", "")]
        self.environment = {
            "CUDA_DOUBLE": str(directory),
            "LD_PRELOAD": str(runtime),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, search)),
        }
        if operators is not None:
            self.environment["CUDA_DOUBLE_OPERATORS"] = str(operators)

    @staticmethod
    def uuid(number: int) -> str:
        """Return the UUID of a card."""
        return f"GPU-{number:08x}-0000-4000-8000-{number:012x}"

    def events(self, *wanted: str) -> list[Event]:
        """Return what the processes did so far, of the wanted kinds."""
        log = self.directory / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        found = (line.split("\t") for line in lines)
        return [
            Event(what, int(pid), command, details)
            for what, pid, command, details in found
            if what in wanted
        ]

    def fail(self, *faults: tuple[int, str, str, str]) -> None:
        """Script faults: code, how often (or ``*``), first parameter (or ``*``), kernel."""
        script = self.directory / "faults"
        partial = self.directory / "faults.partial"
        partial.write_text("".join(" ".join(map(str, each)) + "\n" for each in faults))
        partial.rename(script)

    def set_outside(self, card: int, size: int) -> None:
        """Let processes that are no part of the test use memory of a card."""
        self._set(card, "outside", size)

    def set_hidden(self, card: int, size: int) -> None:
        """Let memory of a card be in use that NVML does not report: allocations fail."""
        self._set(card, "hidden", size)

    def set_lost(self, card: int, lost: bool = True) -> None:
        """Let a card fall off the bus, as NVML reports it; or let it return."""
        self._set(card, "lost", int(lost))

    def launches(self, card: int) -> int:
        """Return how many kernels were launched on a card."""
        return int(_CardState.from_buffer_copy(self._state_path(card).read_bytes()).launches)

    def nvml(self) -> list[NvmlView]:
        """Ask NVML about all cards."""
        done = subprocess.run(
            [sys.executable, "-c", _NVML],
            env={**os.environ, **self.environment},
            check=True,
            capture_output=True,
            text=True,
        )
        return [
            NvmlView(used, {int(pid): size for pid, size in processes.items()})
            for used, processes in json.loads(done.stdout)
        ]

    def _set(self, card: int, field: str, value: int) -> None:
        member = getattr(_CardState, field)
        with self._state_path(card).open("r+b") as file:
            file.seek(member.offset)
            file.write(value.to_bytes(member.size, sys.byteorder))

    def _state_path(self, card: int) -> Path:
        return self.directory / f"state{card}"
