"""A restarted engine continues with the accounts of the one before."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_sing.scheduler import events
from jupyter_sing.scheduler.decisions import Decision, Grant, Queued
from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.scheduler.persistence import AccountsError
from jupyter_sing.scheduler.settings import DeviceSpec, EngineSettings, QuotaLimits, Tier
from tests.doubles.scheduler.controller import FakeController

GB = 10**9
SETTINGS = EngineSettings(quanta=(1.0, 2.0, 4.0, 8.0))
DEVICES = [DeviceSpec(f"node0/gpu{index}", 16 * GB) for index in range(2)]
SESSION_TERMS = {
    "a0": ("lab", "ann", Tier.STANDARD),
    "a1": ("lab", "ann", Tier.STANDARD),
    "a2": ("lab", "ann", Tier.BASIC),
    "b0": ("lab", "bob", Tier.STANDARD),
    "b1": ("lab", "bob", Tier.PREMIUM),
    "c0": ("course", "cyd", Tier.BASIC),
}


def written(engine: Engine, now: float) -> dict[str, Any]:
    """Return the accounts of an engine, as read from a file."""
    document = json.loads(json.dumps(engine.accounts(now)))
    assert isinstance(document, dict)
    return document


def host_of(
    accounts: object = None, now: float = 0.0, found: EngineSettings = SETTINGS
) -> FakeController:
    host = FakeController(Engine(DEVICES, found, accounts=accounts, now=now), DEVICES, delay=0.25)
    host.now = now
    return host


def populate(host: FakeController) -> None:
    for name, (vc, user, tier) in SESSION_TERMS.items():
        host.open(name, GB, vc=vc, user=user, tier=tier)


def want_too_much(host: FakeController) -> None:
    """Let sessions wait that can never be served, so that debts remain when other work ends."""
    wide = {"ann-wide": ("lab", "ann"), "bob-wide": ("lab", "bob"), "cyd-wide": ("course", "cyd")}
    for name, (vc, user) in wide.items():
        host.open(name, vc=vc, user=user, gpus=3)
    for name in sorted(wide, key=lambda name: host.engine.tags(name, host.now)):
        host.submit(name, 1.0)


def play(host: FakeController, script: list[tuple[str, float, float]]) -> None:
    """Submit cells of (session, seconds) one pause after the other, of sessions that are idle."""
    busy: set[str] = getattr(host, "busy", set())
    host.finished = busy.discard
    for name, seconds, pause in script:
        if name not in busy:
            busy.add(name)
            host.submit(name, seconds)
        host.run_until(host.now + pause)


def ended(host: FakeController) -> None:
    """Run until all cells have ended, and until no state depends on the last minute."""
    host.run_until(host.now + 20_000.0)
    assert not any(host.holders.values())


def line_of(at: float, decision: Decision) -> str:
    return f"{at} {decision!r}"


def decided(host: FakeController, since: float) -> list[str]:
    """Return what was granted, preempted and reported."""
    return [line_of(at, d) for at, d in host.decided if at >= since]


cells = st.lists(
    st.tuples(
        st.sampled_from(sorted(SESSION_TERMS)),
        st.sampled_from([0.25, 1.5, 12.0, 200.0]),
        st.sampled_from([0.0, 0.5, 16.0]),
    ),
    min_size=3,
    max_size=20,
)


@given(before=cells, after=cells)
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_the_same_is_decided_as_without_a_restart(
    before: list[tuple[str, float, float]], after: list[tuple[str, float, float]]
) -> None:
    # After this every session is on a device: both begin with the same memory in the same places.
    old = host_of()
    populate(old)
    want_too_much(old)
    play(old, before)
    ended(old)
    now = old.now
    new = host_of(written(old.engine, now), now)
    for name, (vc, user, tier) in SESSION_TERMS.items():
        home = next(iter(old.notebooks[name].homes), None)
        new.open(name, GB, vc=vc, user=user, tier=tier, device=home)
    want_too_much(new)
    said = len(new.decided)
    for host in (old, new):
        play(host, after)
        ended(host)
    assert decided(old, now) == [line_of(*each) for each in new.decided[said:]]
    assert old.engine.statistics().served == new.engine.statistics().served


@given(before=cells)
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_nothing_is_lost_or_gained(before: list[tuple[str, float, float]]) -> None:
    old = host_of()
    populate(old)
    play(old, before)  # some hold leases now, and some wait
    first = written(old.engine, old.now)
    new = host_of(first, old.now)
    assert new.engine.statistics().served == old.engine.statistics().served
    unclaimed = written(new.engine, old.now)
    populate(new)
    assert written(new.engine, old.now) == unclaimed == first
    # On another clock only the slots of a day and of an hour differ, by half of one at most.
    later = written(Engine(DEVICES, SETTINGS, accounts=first, now=7.0), 7.0)
    for key in ("token", "turn", "violations", "reached", "devices"):
        assert later[key] == first[key]
    for one, other in zip(first["users"], later["users"], strict=True):
        assert {**one, "day": 0} == {**other, "day": 0}
        assert sum(used for _, used in one["day"]) == sum(used for _, used in other["day"])


def test_writing_down_changes_nothing() -> None:
    script = [(name, 12.0, 0.5) for name in SESSION_TERMS] * 3
    one, other = host_of(), host_of()
    for host in (one, other):
        populate(host)
        for step in script:
            play(host, [step])
            if host is other:
                host.engine.accounts(host.now)
        host.run_until(500.0)
    assert decided(one, 0.0) == decided(other, 0.0)


def test_tokens_continue() -> None:
    old = host_of()
    populate(old)
    play(old, [("a0", 1.0, 5.0), ("b0", 1.0, 5.0)])
    new = host_of(written(old.engine, old.now), 0.0)
    new.token = old.token
    populate(new)
    new.submit("a0", 1.0)  # the double refuses a token that is not above all before
    new.run_until(10.0)
    assert new.served("a0") == 1.0


def test_a_user_with_a_day_of_device_time_waits_after_a_restart() -> None:
    found = EngineSettings(user_limits={("lab", "ann"): QuotaLimits(gpu_seconds_per_day=60.0)})
    old = host_of(found=found)
    populate(old)
    play(old, [("a0", 2.0, 100.0), ("a0", 100.0, 200.0)])
    new = host_of(written(old.engine, old.now), 1_000_000.0, found)  # on another clock
    populate(new)
    new.submit("a0", 1.0)
    assert [type(d) for _, d in new.decided] == [Queued]
    explained = new.engine.explain("a0", new.now)
    assert explained is not None
    assert explained.expected_wait is not None
    assert 86_400.0 - 1200.0 < explained.expected_wait < 86_400.0 + 1200.0


def test_a_user_with_more_device_time_stands_behind_after_a_restart() -> None:
    old = host_of()
    populate(old)
    old.submit("c0", 1e6)
    play(old, [("a0", 300.0, 1.0), ("b0", 1e6, 299.0)])
    new = host_of(written(old.engine, old.now), 0.0)
    populate(new)
    new.open("x", GB, vc="other", user="x", gpus=2)
    new.submit("x", 1.0)
    users = {entry["user"]: entry["tag"] for entry in new.engine.accounts(0.0)["users"]}
    assert users["bob"] > 100.0
    assert users["ann"] > 100.0
    assert users["x"] == 0.0


def test_a_cell_continues_at_its_level() -> None:
    old = host_of()
    populate(old)
    play(old, [("a0", 1000.0, 100.0)])
    new = host_of(written(old.engine, old.now), 0.0)
    populate(new)
    new.submit("a0", 900.0)
    new.run_until(1.0)
    (grant,) = [d for _, d in new.decided if isinstance(d, Grant)]
    assert grant.quantum == SETTINGS.quanta[-1]
    new.run_until(2000.0)
    new.submit("a0", 1.0)
    assert [d.quantum for _, d in new.decided if isinstance(d, Grant)][-1] == SETTINGS.quanta[0]


def test_measured_device_rates_survive_a_restart() -> None:
    old = host_of()
    old.tell(events.BandwidthMeasured(0.0, "node0/gpu1", 3e9, 0.5))
    new = Engine(DEVICES, accounts=written(old.engine, 1.0), now=1.0)
    device = new.devices()[1]
    assert (device.bytes_per_second, device.constant_seconds) == (3e9, 0.5)


def test_sessions_that_are_not_opened_again_are_kept_for_an_hour() -> None:
    old = host_of()
    populate(old)
    play(old, [("a0", 10.0, 20.0)])
    new = Engine(DEVICES, accounts=written(old.engine, old.now), now=0.0)
    assert [e["session"] for e in new.accounts(3000.0)["sessions"]] == sorted(SESSION_TERMS)
    assert new.accounts(4000.0)["sessions"] == []


def test_unknown_keys_and_devices_are_left_out() -> None:
    old = host_of()
    populate(old)
    document = {**written(old.engine, 0.0), "colour": "blue"}
    document["users"][0]["shoes"] = 43
    document["devices"].append(
        {"device": "gone", "bytes_per_second": 1, "constant_seconds": 1, "swaps": 1}
    )
    assert Engine(DEVICES, accounts=document).accounts(0.0)["clusters"] == document["clusters"]


def _damaged() -> list[tuple[str, object]]:
    def changed(path: str, value: object) -> dict[str, Any]:
        old = host_of()
        populate(old)
        play(old, [("a0", 10.0, 20.0)])
        document = written(old.engine, old.now)
        target: Any = document
        *steps, last = path.split(".")
        for step in steps:
            target = target[int(step)] if step.isdigit() else target[step]
        target[last] = value
        return document

    return [
        ("no object", []),
        ("version None", {}),
        ("version 2", changed("version", 2)),
        ("version True", changed("version", True)),
        ("accounts.token", changed("token", -1)),
        ("accounts.token", changed("token", math.nan)),
        ("accounts.turn", changed("turn", "1")),
        ("accounts.turn", changed("turn", True)),
        ("accounts.reached", changed("reached", [1.0])),
        ("accounts.users is not a list", changed("users", {"a": 1})),
        ("accounts.users[0]", changed("users", [None])),
        ("accounts.users[0].tag", changed("users.0.tag", math.inf)),
        ("accounts.users[0].tag", changed("users.0.tag", 10**400)),
        ("accounts.users[0].user", changed("users.0.user", ["ann"])),
        ("accounts.users[0].day", changed("users.0.day", [[1.0]])),
        ("accounts.users[0].day", changed("users.0.day", [[1.0, None]])),
        ("accounts.sessions[0].hour", changed("sessions.0.hour", "hour")),
        ("accounts.devices[1].swaps", changed("devices.1.swaps", None)),
    ]


@pytest.mark.parametrize(("where", "document"), _damaged())
def test_unreadable_accounts_are_refused_in_one_sentence(where: str, document: object) -> None:
    with pytest.raises(AccountsError) as refused:
        Engine(DEVICES, accounts=document)
    assert where in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 200


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(
                    ["version", "token", "turn", "users", "clusters", "sessions", "day", "reached"]
                ),
                inner,
                max_size=6,
            )
        ),
        max_leaves=12,
    )
)
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_anything_is_read_or_refused(document: object) -> None:
    if isinstance(document, dict):
        document["version"] = 1
    try:
        Engine(DEVICES, accounts=document)
    except AccountsError:
        return
    assert document is None
