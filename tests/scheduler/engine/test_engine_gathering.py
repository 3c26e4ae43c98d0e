"""Simultaneous events: the session with the highest debt goes first, in any order of events."""

from __future__ import annotations

from jupyter_sing.scheduler import events
from jupyter_sing.scheduler.decisions import Grant, Queued
from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.scheduler.settings import DeviceSpec, EngineSettings, Tier

SETTINGS = EngineSettings(quanta=(1000.0,) * 4)
NAMES = ("rich", "third", "poor")


def engine(accounts: object = None, now: float = 0.0) -> Engine:
    return Engine([DeviceSpec("cpu:0", 1 << 30)], SETTINGS, None, accounts, now)


def opened(found: Engine, at: float) -> None:
    for name in NAMES:
        found.handle(events.SessionAdded(at, name, "lab", name, Tier.BASIC))


def before() -> dict[str, object]:
    """Return the accounts after one user had a device while two others waited for it."""
    found = engine()
    opened(found, 0.0)
    for name in NAMES:
        found.handle(events.CellSubmitted(0.0, name))
    found.handle(events.Started(0.0, "rich", 1))
    (granted,) = found.handle(events.CellFinished(1.0, "rich"))
    assert isinstance(granted, Grant)
    assert granted.session == "third"
    found.handle(events.Started(1.0, "third", granted.token))
    found.handle(events.CellSubmitted(1.0, "rich"))
    assert found.tags("third", 1.5)[1:] == (0.5, 0.5)
    assert found.tags("poor", 1.5)[1] == 0.0
    assert found.tags("nobody", 1.5) == ()
    return found.accounts(1.5)


def test_requests_in_the_order_of_their_tags_are_served_in_that_order() -> None:
    found = engine(before(), 10.0)
    opened(found, 10.0)
    asking = sorted(NAMES, key=lambda name: found.tags(name, 10.0))
    assert asking == ["poor", "third", "rich"]
    granted, *waiting = found.handle(*(events.CellSubmitted(10.0, name) for name in asking))
    assert isinstance(granted, Grant)
    assert granted.session == "poor"
    assert [each.session for each in waiting if isinstance(each, Queued)] == ["third", "rich"]
    (granted,) = found.handle(events.CellFinished(10.0, "poor"))
    assert isinstance(granted, Grant)
    assert granted.session == "third"
