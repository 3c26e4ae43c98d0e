"""Descriptions of sessions, devices, checkpoints and activity: JSON objects in replies and REST.

Each is the schema of the same name in ``jupyter_sing/server/openapi.yaml``, which says what the
fields mean; a test compares them.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, Required, TypedDict

Tier = Literal["resident", "parked", "cold"]

#: Sessions with which a session takes turns. A class cannot have a field named ``with``.
SharedView = TypedDict("SharedView", {"devices": list[str], "with": list[str], "share": float})


class SnapshotView(TypedDict):
    """The newest snapshot of a session."""

    taken: str
    position: int
    bytes: int
    copied: int
    seconds: float
    stalled: float


class MigrationView(TypedDict):
    """The last migration of a session."""

    source: str
    target: str
    seconds: float
    downtime: float
    bytes: int


class ExactnessView(TypedDict):
    """Since when a session's values are, or after a recovery would be, approximate."""

    deterministic: bool
    approximate_since: str | None
    recovered_since: str | None
    diverged: int


class AutomaticView(TypedDict):
    """Intervals of automatic checkpoints, and why there is none."""

    every: float
    cells: int
    keep: int
    problem: str


class LastCheckpointView(TypedDict):
    """The checkpoint from which a session's notebook can be restored."""

    name: str
    created: str
    automatic: bool
    earlier: bool
    died: bool


class ProgressView(TypedDict):
    """A save, a restore or a preparation in progress."""

    verb: str
    checkpoint: str
    done: int
    total: int


class SessionView(TypedDict):
    """One session; its ``state`` is a `kernelproxy.agent.session.states.State`."""

    id: str
    name: str
    owner: str
    kernel_id: str
    kernel_pid: int | None
    worker_pid: int | None
    state: str
    tier: Tier
    device: str | None
    memory: int
    log_head: int
    log_consumed: int
    log_bytes: int
    last_activity: str
    operators: int
    gpu_seconds: float
    step_seconds: float | None
    memory_nadir: int | None
    recoverable: bool
    queued_for: float
    queue_position: int | None
    expected_wait: float | None
    suspended_by: str | None
    suspended_at: str | None
    shared: SharedView | None
    served_as: str | None
    promised: float | None
    pinned: bool
    priority: str | None
    loading: int
    snapshot: SnapshotView | None
    migration: MigrationView | None
    exactness: NotRequired[ExactnessView | None]
    automatic: AutomaticView
    last_checkpoint: LastCheckpointView | None
    progress: ProgressView | None
    reason: str
    parent: str
    job: str
    rank: int | None
    ranks: int | None


class OutsideProcessView(TypedDict):
    """A process that uses a device and is no worker of this daemon."""

    pid: int
    user: str
    command: str
    memory: int | None


class OutsideView(TypedDict):
    """Memory of a GPU that no session uses; `complete`: the driver tells who uses the GPU."""

    memory: int
    contexts: int
    complete: bool
    processes: list[OutsideProcessView]


class DeviceView(TypedDict):
    """One device, with the ids of the sessions on it; `failure`: why it is out of use, or empty."""

    id: str
    kind: str
    name: str
    memory_total: int
    memory_used: int
    sessions: list[str]
    failure: str
    outside: NotRequired[OutsideView]


class OmissionView(TypedDict):
    """A variable that was not saved, or not restored."""

    name: str
    why: str
    partly: bool


class SavedView(TypedDict, total=False):
    """A saved variable."""

    name: str
    kind: str
    bytes: int


class CheckpointView(TypedDict, total=False):
    """A checkpoint; one that cannot be read has only a name, a time and a problem."""

    name: Required[str]
    created: Required[str]
    problem: str
    session: str
    notebook: str
    kernel_id: str
    automatic: bool
    forms: list[str]
    torch: str
    device: str
    bytes: int
    stored: int
    exclusive: int
    saved: list[SavedView]
    omitted: list[OmissionView]
    only_process: list[OmissionView]
    files: int


class CheckpointOnServer(CheckpointView):
    """A checkpoint with the path of its notebook below the server's root."""

    path: Required[str]


class RestoreView(TypedDict):
    """Outcome of a restore."""

    checkpoint: str
    variables: int
    files: int
    aside: dict[str, str]
    form: NotRequired[str]
    why: NotRequired[str]
    problems: list[OmissionView]


class DifferenceView(TypedDict):
    """A change by another policy, and its users."""

    text: str
    who: list[str]
    place: str | None
    changes: list[str]
    consequences: list[str]


class PolicyEffect(TypedDict):
    """Effect of another policy."""

    affected: list[DifferenceView]
    notes: list[str]


class DecisionView(TypedDict):
    """A decision of the scheduler about a session."""

    at: float
    session: str
    name: str
    kind: str
    reason: str


class WaitsView(TypedDict):
    """Waits for a device: see `jupyter_sing.controller.time_to_gpu.WaitTimes.figures`."""

    count: int
    seconds: float
    classes: list[list[Any]]
    p50: float
    p99: float


class SharingView(TypedDict, total=False):
    """Results of the scheduler's decisions so far; empty if there is no scheduler."""

    time_to_gpu: dict[str, WaitsView]
    preemptions: int
    switches: int
    evictions: int
    migrations: int
    tier_violations: int
    served: dict[str, dict[str, float]]


class SpanView(TypedDict):
    """A time in which a session held a device."""

    session: str
    name: str
    owner: str
    device: str
    state: str
    start: float
    end: float
    seconds: NotRequired[float]


class EventView(TypedDict):
    """An event of a session."""

    at: float
    kind: str
    session: str
    name: str
    owner: str
    device: str
    text: str


class DeviceActivityView(TypedDict):
    """Use of one device over time; the pairs are of a moment and a value."""

    id: str
    kind: str
    memory_total: int
    executed: NotRequired[float]
    held: list[SpanView]
    memory: list[list[float]]
    queue: list[list[float]]


class ActivityView(TypedDict):
    """Use of all devices over time, and events."""

    since: float
    until: float
    resolution: float
    devices: list[DeviceActivityView]
    events: list[EventView]
