"""A guarantee is worth as much as a private cluster, whatever the other users do.

The same cells are submitted at the same times to a virtual cluster among others, and to a private
cluster with just its guaranteed devices.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.scheduler.hived.config.configuration import Configuration
from jupyter_sing.scheduler.hived.leases import HivedGuarantees
from jupyter_sing.scheduler.settings import DeviceSpec, EngineSettings, Tier
from tests.doubles.scheduler.controller import FakeController

GB = 10**9
MEMORY = 16 * GB
DELAY = 0.05
# Others are stopped, their memory is evicted, one's own is loaded; no wait is longer than that.
GRACE = EngineSettings().run_min + 2 * DELAY + 2 * MEMORY / 20e9


@dataclass(frozen=True)
class PlannedCell:
    """A cell of `seconds` that comes `pause` after the one before was submitted."""

    session: int
    pause: float
    seconds: float


requests = st.lists(
    st.builds(
        PlannedCell,
        st.integers(0, 3),
        st.sampled_from([0.0, 0.3, 2.0, 30.0, 200.0]),
        st.sampled_from([0.2, 1.0, 8.0, 100.0]),
    ),
    min_size=1,
    max_size=12,
)


def cluster(nodes: list[int], promised: dict[str, int]) -> FakeController:
    names = {f"node{n}": [f"node{n}/gpu{i}" for i in range(count)] for n, count in enumerate(nodes)}
    devices = [DeviceSpec(name, MEMORY, node) for node, here in names.items() for name in here]
    guarantees = HivedGuarantees(Configuration.of_nodes(names, promised))
    found = EngineSettings(quanta=(1.0, 2.0, 4.0, 8.0))
    return FakeController(Engine(devices, found, guarantees), devices, DELAY)


def served(
    host: FakeController,
    mine: list[PlannedCell],
    theirs: list[tuple[PlannedCell, Tier]],
    count: int,
    gpus: int,
) -> list[tuple[float, float]]:
    """Return time to the device and time to the end of each of our submitted cells."""
    coming = []
    for owner, stream in (("own", [(request, Tier.BASIC) for request in mine]), ("other", theirs)):
        at = 0.0
        for request, tier in stream:
            at += request.pause
            coming.append((at, owner != "own", request, tier))
    coming.sort(key=lambda each: each[:2])
    begins: dict[str, float] = {}
    found: dict[tuple[str, float], list[float]] = {}

    def finished(name: str) -> None:
        begun = begins.pop(name)
        if name.startswith("own"):
            first = host.notebooks[name].first
            assert first is not None
            found[name, begun] = [first - begun, host.now - begun]

    host.finished = finished
    for at, other, request, tier in coming:
        host.run_until(at)
        name = f"other{request.session}{tier}" if other else f"own{request.session % count}"
        if name not in host.notebooks:
            host.open(
                name,
                (9 if other else 7) * GB,
                vc="other" if other else "own",
                user=name,
                tier=tier,
                gpus=1 if other else gpus,
            )
        if name not in begins:
            begins[name] = at
            host.submit(name, request.seconds)
    host.run_until(host.now + 5_000.0)
    return [tuple(found[key]) for key in sorted(found, key=lambda key: (key[1], key[0]))]  # type: ignore[misc]


@given(
    mine=requests,
    theirs=st.lists(
        st.tuples(
            st.builds(
                PlannedCell,
                st.integers(0, 7),
                st.sampled_from([0.0, 0.0, 0.5, 10.0]),
                st.sampled_from([0.5, 20.0, 1000.0]),
            ),
            st.sampled_from(list(Tier)),
        ),
        max_size=25,
    ),
    guaranteed=st.integers(1, 4),
    nodes=st.sampled_from([[4], [4, 2], [8]]),
    gang=st.booleans(),
)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_a_guarantee_is_as_good_as_devices_of_ones_own(
    mine: list[PlannedCell],
    theirs: list[tuple[PlannedCell, Tier]],
    guaranteed: int,
    nodes: list[int],
    gang: bool,
) -> None:
    gang = gang and guaranteed in (1, 2, 4)  # as a single promised cell
    count, gpus = (1, guaranteed) if gang else (guaranteed, 1)
    alone = cluster([guaranteed], {"own": guaranteed})
    private = served(alone, mine, [], count, gpus)
    rest = sum(nodes) - guaranteed
    host = cluster(nodes, {"own": guaranteed, "other": rest} if rest else {"own": guaranteed})
    shared = served(host, mine, theirs, count, gpus)
    # A cell that ends later may prevent the session's next one, which is then not submitted.
    for ours, theirs_alone in zip(shared, private, strict=False):
        assert ours[0] <= theirs_alone[0] + GRACE
        assert ours[1] <= theirs_alone[1] + GRACE
