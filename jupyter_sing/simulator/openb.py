"""Pods and nodes of openb: Alibaba's trace of 2023 of a cluster whose GPUs are shared.

Its pods request whole GPUs or a fraction of one, in thousandths. Source:
hkust-adsl/kubernetes-scheduler-simulator (Apache-2.0); described in Weng et al., Beware of
Fragmentation (USENIX ATC 2023).
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from jupyter_sing.simulator.fragmentation import WHOLE
from jupyter_sing.simulator.workload import (
    Cell,
    SimulatedSession,
    Workload,
    WorkloadError,
    arranged,
    shown,
)

POD_COLUMNS = ("name", "num_gpu", "gpu_milli", "creation_time", "deletion_time", "scheduled_time")
NODE_COLUMNS = ("sn", "gpu")


@dataclass(frozen=True, slots=True)
class Pod:
    """A request for devices; `share` is in thousandths of each, times are in seconds.

    `scheduled` is None if it never ran.
    """

    name: str
    gpus: int
    share: int
    created: float
    deleted: float
    scheduled: float | None


def read_pods(lines: Iterable[str]) -> list[Pod]:
    """Read pods that request GPUs, in the order of their creation.

    Raises
    ------
    WorkloadError
        A column is missing, or a value is invalid.
    """
    pods = []
    for line, row in _rows(lines, POD_COLUMNS):
        gpus, share = _whole(line, row, "num_gpu"), _whole(line, row, "gpu_milli")
        if gpus == 0:
            continue
        if not 0 < share <= WHOLE or (gpus > 1 and share != WHOLE):
            raise WorkloadError(f"line {line}: {gpus} GPUs of {share} thousandths cannot be")
        created, deleted = (_whole(line, row, name) for name in POD_COLUMNS[3:5])
        scheduled = _whole(line, row, "scheduled_time") if row["scheduled_time"] else None
        pods.append(Pod(row["name"], gpus, share, created, deleted, scheduled))
    return sorted(pods, key=lambda pod: pod.created)


def read_nodes(lines: Iterable[str]) -> dict[str, int]:
    """Read how many GPUs each node has.

    Raises
    ------
    WorkloadError
        A column is missing, or a value is invalid.
    """
    return {row["sn"]: _whole(line, row, "gpu") for line, row in _rows(lines, NODE_COLUMNS)}


def is_pods(header: str) -> bool:
    """True if the first line of a file is that of a file of pods."""
    return set(POD_COLUMNS) <= set(header.strip().split(","))


def workload(pods: Sequence[Pod], memory: int) -> Workload:
    """Create sessions of one cell each; a pod holds as much of the memory as of the device.

    Pods that never ran are left out.

    Raises
    ------
    WorkloadError
        No pod ran.
    """
    sessions = [
        SimulatedSession(
            pod.name,
            pod.gpus,
            memory * pod.share // WHOLE,
            (Cell(pod.created, pod.deleted - pod.scheduled),),
        )
        for pod in pods
        if pod.scheduled is not None and pod.deleted > pod.scheduled
    ]
    if not sessions:
        raise WorkloadError("line 1: no pod ran on a GPU")
    return arranged(sessions)


def _rows(lines: Iterable[str], columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    reader = csv.DictReader(lines)
    missing = [name for name in columns if name not in (reader.fieldnames or ())]
    if missing:
        raise WorkloadError(f"line 1: there is no column {missing[0]}")
    try:
        for row in reader:
            if any(not isinstance(row[name], str) for name in columns):
                raise WorkloadError(f"line {reader.line_num}: a field is missing")
            yield reader.line_num, row
    except csv.Error as error:
        raise WorkloadError(f"line {reader.line_num}: {error}") from error


def _whole(line: int, row: dict[str, str], name: str) -> int:
    if not (row[name].isascii() and row[name].isdigit() and len(row[name]) < 16):
        raise WorkloadError(
            f"line {line}: {name} must be a whole number from 0, not {shown(row[name])}"
        )
    return int(row[name])
