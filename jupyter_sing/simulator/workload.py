"""Workloads of notebooks: sessions that run cells, one after the other, and think in between.

They are *closed loops*: a row of a workload fixes how long its cell computes and how long the user
thinks before it, not when it starts. A cell that waited delays everything that its session does
later, as in a notebook.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

GB = 10**9
MINUTE = 60.0
MEMORY_DEFAULT = 8 * GB
MINUTES_MAX = 1e7  # 19 years: longer ones are mistakes, and would take long to simulate
HEADER = ("session", "num_gpu", "start_min", "dur_min")
MEMORY_COLUMN = "memory_gb"
LEAST_COLUMN = "min_gpu"


class WorkloadError(ValueError):
    """A workload cannot be read; the message is one line and names the line of the file."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell.

    Parameters
    ----------
    think : float
        Seconds between the end of the cell before it and its submission; of the first cell,
        between the beginning of the workload and its submission.
    duration : float
        Seconds that it computes on its devices.
    """

    think: float
    duration: float


@dataclass(frozen=True, slots=True)
class SimulatedSession:
    """One notebook.

    Parameters
    ----------
    name : str
    gpus : int
        Devices that each of its cells needs, all at once.
    memory : int
        Bytes that it holds on each of them.
    cells : tuple of Cell
        At least one.
    gpus_min : int, optional
        Its cells are jobs with a rank per device, which run on as few devices as this, too: ranks
        that share one take turns, and each holds its memory. None: they need exactly `gpus`.
    """

    name: str
    gpus: int
    memory: int
    cells: tuple[Cell, ...]
    gpus_min: int | None = None

    @property
    def alone(self) -> float:
        """Seconds from the beginning of the workload to its end, if it never waits."""
        return math.fsum(cell.think + cell.duration for cell in self.cells)


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions, in the order of their first cells."""

    sessions: tuple[SimulatedSession, ...]

    @property
    def cells(self) -> int:
        """Number of cells."""
        return sum(len(session.cells) for session in self.sessions)

    @property
    def work(self) -> float:
        """Device-seconds of all cells."""
        return math.fsum(s.gpus * cell.duration for s in self.sessions for cell in s.cells)

    @property
    def span(self) -> float:
        """Seconds until the last session would end, if none ever waited."""
        return max((session.alone for session in self.sessions), default=0.0)


def read(lines: Iterable[str]) -> Workload:
    """Read a workload from CSV, a row per cell.

    The columns are ``session,num_gpu,start_min,dur_min[,memory_gb[,min_gpu]]``. Rows of a session
    may be anywhere; they are sorted by their starts. A session needs the most devices and memory
    that any of its rows names; without `memory_gb`, 8 GB. With `min_gpu`, in any of its rows, it is
    elastic down to the most of these.

    Raises
    ------
    WorkloadError
        The file has no such header, a row has the wrong number of fields or an invalid value, or
        there is no row at all.
    """
    numbered = ((n, text.strip()) for n, text in enumerate(lines, 1))
    rows = ((n, [field.strip() for field in text.split(",")]) for n, text in numbered if text)
    line, header = next(rows, (1, []))
    columns = (*HEADER, MEMORY_COLUMN, LEAST_COLUMN)[: max(len(header), len(HEADER))]
    if tuple(header) != columns:
        names = f"{','.join(HEADER)}[,{MEMORY_COLUMN}[,{LEAST_COLUMN}]]"
        raise WorkloadError(f"line {line}: the header must be {names}")
    found: dict[str, list[_Row]] = {}
    for number, fields in rows:
        if len(fields) != len(columns):
            raise WorkloadError(
                f"line {number}: {len(columns)} fields are needed, there are {len(fields)}"
            )
        if not fields[0]:
            raise WorkloadError(f"line {number}: session is empty")
        gpus = _count(number, "num_gpu", fields[1])
        start, duration = (
            _number(number, name, text) * MINUTE
            for name, text in zip(HEADER[2:], fields[2:4], strict=True)
        )
        if max(start, duration) > MINUTES_MAX * MINUTE:
            raise WorkloadError(
                f"line {number}: it is later or longer than {MINUTES_MAX:g} minutes"
            )
        memory = (
            _number(number, MEMORY_COLUMN, fields[4]) * GB if len(fields) > 4 else MEMORY_DEFAULT
        )
        least = _count(number, LEAST_COLUMN, fields[5]) if any(fields[5:]) else 0
        if least > gpus:
            raise WorkloadError(f"line {number}: {LEAST_COLUMN} must not be more than num_gpu")
        found.setdefault(fields[0], []).append(_Row(start, duration, gpus, int(memory), least))
    if not found:
        raise WorkloadError(f"line {line}: there is no row after the header")
    return arranged(_session(name, cells) for name, cells in found.items())


def arranged(sessions: Iterable[SimulatedSession]) -> Workload:
    """Create a workload of sessions in any order."""
    return Workload(tuple(sorted(sessions, key=lambda session: session.cells[0].think)))


class _Row(NamedTuple):
    """One row; `least` is 0 if it has no `min_gpu`."""

    start: float
    duration: float
    gpus: int
    memory: int
    least: int


def _session(name: str, rows: Sequence[_Row]) -> SimulatedSession:
    cells, end = [], 0.0
    for row in sorted(rows, key=lambda row: row.start):
        cells.append(Cell(max(0.0, row.start - end), row.duration))
        end = max(row.start, end) + row.duration
    gpus, memory = max(row.gpus for row in rows), max(row.memory for row in rows)
    least = max(row.least for row in rows)
    return SimulatedSession(name, gpus, memory, tuple(cells), least or None)


def _count(line: int, name: str, text: str) -> int:
    """Read a whole number from 1."""
    value = _number(line, name, text)
    if value < 1 or value != int(value):
        raise WorkloadError(f"line {line}: {name} must be a whole number from 1, not {value:g}")
    return int(value)


def _number(line: int, name: str, text: str) -> float:
    """Read a finite number that is not negative."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise WorkloadError(f"line {line}: {name} must be a number from 0, not {shown(text)}")
    return value


def shown(text: str) -> str:
    """Quote a field for a message: on one line, and shortened."""
    return repr(text if len(text) <= 40 else f"{text[:40]}…")


def write(workload: Workload) -> Iterator[str]:
    """Write a workload as the CSV that `read` reads, line by line, with starts as if none waited.

    Names that contain a comma or a line break cannot be written and raise `WorkloadError`.
    """
    is_elastic = any(session.gpus_min is not None for session in workload.sessions)
    yield ",".join((*HEADER, MEMORY_COLUMN, *([LEAST_COLUMN] if is_elastic else [])))
    for session in workload.sessions:
        if any(c in session.name for c in ",\r\n"):
            raise WorkloadError(f"session {shown(session.name)} has a comma or a line's end in it")
        now = 0.0
        for cell in session.cells:
            now += cell.think
            minutes = f"{now / MINUTE:.7f},{cell.duration / MINUTE:.7f}"
            row = f"{session.name},{session.gpus},{minutes},{session.memory / GB:.9f}"
            yield f"{row},{session.gpus_min or ''}" if is_elastic else row
            now += cell.duration
