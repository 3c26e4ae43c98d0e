"""A policy is applied to a running daemon: it takes effect, without disturbing any cell."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jupyter_sing.cli import commands
from jupyter_sing.controller import decision_log
from jupyter_sing.scheduler.policy import parse, resolve
from kernelproxy.agent.api.peer_limits import user_of
from kernelproxy.agent.session import reasons
from kernelproxy.agent.session.idle_timer import waits
from kernelproxy.agent.settings import AgentSettings
from kernelproxy.common import paths
from kernelproxy.common.errors import ControlError
from kernelproxy.common.ipc import agent_client
from kernelproxy.common.protocol import CloseSession, GetPolicy, OpenSession, SetPolicy, Suspend
from kernelproxy.common.protocol.views import SessionView
from kernelproxy.common.scheduler_api import Allowance
from kernelproxy.common.shared_memory import Presence
from tests.doubles.session.client import ToyClient
from tests.doubles.waiting import wait_until
from tests.integration.conftest import ToyHost

EXAMPLES = Path(__file__).parents[3] / "docs" / "policies"
StartHost = Callable[..., ToyHost]
MIB = 1 << 20

#: Turns that never end.
ENGINE = {"engine": {"quanta": [1000.0] * 4}}

LAB = """
virtual_clusters:
  lab:
    users: [{name: ada, tier: premium, weight: 3}, {name: bob, tier: basic}]
"""


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JUPYTER_SING_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def apply(host: ToyHost, policy: str, *, dry: bool = False) -> list[str]:
    """Apply a policy; return descriptions of the users that it affects."""
    return [each["text"] for each in host.call(SetPolicy(policy, dry)).affected]


def decisions(client: ToyClient, kind: str) -> list[str]:
    """Return the decisions about a session so far, of one kind."""
    try:
        found = decision_log.read(paths.runtime_dir(), client.session, 1000)
    except ControlError:
        return []
    return [each.reason for each in found if each.kind == kind]


def queued(host: ToyHost, client: ToyClient) -> SessionView:
    return wait_until(lambda: host.when(client, "queued"))


# -------------------------------------------------------------------- identity of users


def test_a_claim_is_believed_from_our_own_user_alone() -> None:
    ours, other = os.getuid(), os.getuid() + 4321
    assert user_of("ada", ours) == user_of("ada", 0) == "ada"
    assert user_of("ada", other) == user_of("", other) == f"uid:{other}"
    assert user_of("", 0) == "root"
    for wrong in ("a\nb", "a" * 201):
        with pytest.raises(ControlError):
            user_of(wrong, ours)


def test_a_number_is_a_uid_only_where_the_policy_declares_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A student's number may be another user's uid, or one of another's subordinate uids."""
    subordinate = tmp_path / "subuid"
    subordinate.write_text("bob:2100000:65536\nbroken\neve:x:1\n")
    monkeypatch.setattr(reasons, "_SUBORDINATE", subordinate)
    names = [reasons.user_name(uid) for uid in (2026001, 2026002, 2100000, 2165535, 2165536)]
    assert names == [
        "uid:2026001",
        "uid:2026002",
        "subuid:2100000",
        "subuid:2165535",
        "uid:2165536",
    ]
    text = """
virtual_clusters:
  lab:
    groups:
      students: {members: [2026001, "uid:2026002", 2100000, "uid:2100000", "2*"]}
others: {admitted: false}
"""
    policy = parse(text)
    assert [resolve(policy, name).admitted for name in names] == [False, True, False, False, False]
    assert resolve(policy, "2026001").admitted  # a user with this name


# -------------------------------------------------------------------- applying


def test_a_policy_names_the_affected_users_and_disturbs_no_cell(
    toy_host: StartHost, tmp_path: Path
) -> None:
    host = toy_host(**ENGINE)
    ada, bob = host.client("ada's", user="ada"), host.client("bob's", user="bob")
    go_on = tmp_path / "go-on"
    with ada.cell():
        for number in range(50):
            ada.add(number)
        host.hold(ada, go_on)
        before = host.session(ada)
        assert (before["owner"], before["served_as"]) == ("ada", "standard")
        expected = [
            "virtual cluster lab: new, guaranteed nothing",
            "ada: virtual cluster default -> lab; tier standard -> premium; weight 1 -> 3; "
            "1 running session keeps its cell",
            "bob: virtual cluster default -> lab; tier standard -> basic",
        ]
        assert apply(host, LAB, dry=True) == expected
        assert host.call(GetPolicy()).policy == ""
        assert apply(host, LAB) == expected
        assert host.call(GetPolicy()).policy == LAB
        assert apply(host, LAB) == []
        after = host.session(ada)
        assert (after["state"], after["served_as"]) == ("running", "premium")
        assert after["worker_pid"] == before["worker_pid"]
        assert host.session(bob)["served_as"] == "basic"
        go_on.touch()
        assert ada.read() == ada.state
    assert decisions(ada, "preempt") == []
    (said,) = wait_until(lambda: decisions(ada, "terms"))
    assert said == "It is served as premium with weight 3, in lab, for ada."


def test_an_unmet_guarantee_is_reported_wherever_it_is_decided(toy_host: StartHost) -> None:
    """One device is promised once, so the second premium session gets nothing of that."""
    host = toy_host(**ENGINE)
    first, second = host.client("first", user="ada"), host.client("second", user="ada")
    assert host.session(second)["promised"] == 0.7
    why = (
        "does not have the 95% of the device time that premium promises: with it, premium sessions "
        "may need 1.05 devices at once, and there is 1."
    )
    for dry in (True, False):
        assert host.call(SetPolicy(LAB, dry)).notes == [f"second of ada {why}"]
    ours, theirs = host.session(first), host.session(second)
    assert (ours["served_as"], ours["promised"]) == ("premium", 0.95)
    assert (theirs["served_as"], theirs["promised"]) == ("premium", 0.0)
    assert "promises" not in ours["reason"]
    assert theirs["reason"].endswith(f"It {why}")
    wait_until(lambda: any(said.endswith(f"It {why}") for said in decisions(second, "terms")))
    host.call(CloseSession(first.session))
    wait_until(lambda: host.session(second)["promised"] == 0.95)
    assert "promises" not in host.session(second)["reason"]


def test_an_invalid_or_missing_policy_changes_nothing(toy_host: StartHost) -> None:
    host = toy_host(**ENGINE)
    apply(host, LAB)
    for wrong, why in (
        ("defaults: {wieght: 2}", "is no key here; did you mean weight"),
        (
            "cluster: {devices_per_host: 4}\nvirtual_clusters: {lab: {guaranteed_devices: 2}}",
            "promised 2 devices, and there are 1",
        ),
    ):
        for dry in (True, False):
            with pytest.raises(ControlError, match=why) as raised:
                apply(host, wrong, dry=dry)
            assert raised.value.reason == "bad-policy"
    assert host.call(GetPolicy()).policy == LAB


def test_the_command_line_explains_the_effective_policy(
    toy_host: StartHost, capsys: pytest.CaptureFixture[str]
) -> None:
    host = toy_host("cpu:1GiB@1,cpu:1GiB@1", **ENGINE)
    client = host.client(user="grace")
    lab, departments = str(EXAMPLES / "lab.yaml"), str(EXAMPLES / "departments.yaml")
    assert commands.main(["policy", "apply", lab]) == 0
    said = capsys.readouterr().out
    assert "grace: virtual cluster default -> lab; tier standard -> premium" in said
    assert "this daemon has 2 devices (cpu:0, cpu:1): everything else in it holds" in said
    assert said.endswith(f"{lab} is applied.\n")
    assert host.session(client)["served_as"] == "premium"
    assert commands.main(["policy", "show", "--user", "grace"]) == 0
    assert "virtual_clusters.lab.users[1].tier" in capsys.readouterr().out
    assert commands.main(["policy", "apply", departments]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"jupyter sing: {departments}: cluster: This daemon has 2 devices")
    assert "It describes 32 devices of gpu1, gpu2, gpu3, gpu4." in error
    assert error.count("\n") == 1


# -------------------------------------------------------------------- outliving daemons


def test_a_policy_outlives_the_agent_and_the_daemon(toy_host: StartHost) -> None:
    host = toy_host(**ENGINE)
    ada = host.client(user="ada")
    host.work(ada)
    apply(host, LAB)
    host.kill_agent()
    found = host.session(ada)
    assert (found["owner"], found["served_as"]) == ("ada", "premium")
    assert host.call(GetPolicy()).policy == LAB
    wait_until(lambda: decisions(ada, "restart"))
    assert decisions(ada, "grant")  # of before the restart
    ada.add(2)
    assert ada.read() == ada.state
    host.end()
    host = toy_host(**ENGINE)
    assert host.call(GetPolicy()).policy == LAB
    assert host.session(host.client(user="bob"))["served_as"] == "basic"


def test_the_file_that_the_environment_names_counts_at_the_start(
    toy_host: StartHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(LAB)
    monkeypatch.setenv("JUPYTER_SING_POLICY", str(file))
    host = toy_host(**ENGINE)
    assert host.call(GetPolicy()).policy == LAB
    apply(host, "defaults: {tier: basic}")
    assert host.call(GetPolicy()).policy == "defaults: {tier: basic}"
    host.kill_agent()
    assert host.call(GetPolicy()).policy == LAB


def test_a_daemon_whose_policy_cannot_be_read_reports_it(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_SING_POLICY", str(runtime_dir / "none.yaml"))
    with pytest.raises(ControlError, match=r"could not start: JUPYTER_SING_POLICY: .*none.yaml"):
        agent_client.connect()


# -------------------------------------------------------------------- idle times, disk


@pytest.mark.parametrize(
    ("asked", "allowed", "found"),
    [
        ((None, 0.0), (None, None), (600.0, 0.0)),
        ((5.0, 7.0), (None, None), (5.0, 7.0)),
        ((0.0, 7.0), (None, None), (0.0, 7.0)),
        ((None, 0.0), (60.0, 90.0), (60.0, 90.0)),
        ((0.0, 0.0), (60.0, 90.0), (60.0, 90.0)),
        ((50.0, 80.0), (60.0, 90.0), (50.0, 80.0)),
        ((70.0, 99.0), (60.0, 90.0), (60.0, 90.0)),
        ((None, 0.0), (float("inf"), float("inf")), (0.0, 0.0)),
        ((50.0, 80.0), (float("inf"), float("inf")), (50.0, 80.0)),
    ],
)
def test_a_requested_timeout_may_be_shorter_than_the_policys(
    asked: tuple[float | None, float],
    allowed: tuple[float | None, float | None],
    found: tuple[float, float],
) -> None:
    request = OpenSession("n", "", "python", asked[0], hibernate_timeout=asked[1])
    assert waits(request, AgentSettings(idle_timeout=600.0), Allowance(*allowed)) == found


def test_idle_times_are_those_of_the_tier(toy_host: StartHost) -> None:
    host = toy_host(idle_timeout=0, **ENGINE)
    soon, never = host.client(user="bob", idle_timeout=0), host.client(user="ada")
    host.work(soon)
    host.work(never)
    assert host.session(soon)["reason"] == reasons.EVER_IDLE
    apply(host, f"{LAB}\ntiers: {{basic: {{suspend_after: 1 s, hibernate_after: 2 s}}}}")
    found = wait_until(lambda: (each := host.session(soon))["tier"] == "cold" and each)
    assert found["state"] == "suspended"
    assert host.session(never)["reason"] == reasons.EVER_IDLE
    soon.add(2)
    assert soon.read() == soon.state


def test_disk_is_for_each_user(toy_host: StartHost) -> None:
    host = toy_host(cold_after=0.01, idle_timeout=0, **ENGINE)
    apply(host, "virtual_clusters: {lab: {users: [{name: ada, quotas: {disk: 0 MiB}}, bob]}}")
    ada, bob = host.client(user="ada"), host.client(user="bob")
    for each in (ada, bob):
        host.work(each)
        host.call(Suspend(each.session))
    wait_until(lambda: host.session(bob)["tier"] == "cold")
    assert host.session(ada)["tier"] == "parked"
    ada.add(2)
    assert ada.read() == ada.state


# -------------------------------------------------------------------- limits of the scheduler


def test_a_user_at_the_device_quota_waits_although_a_device_is_free(
    toy_host: StartHost, tmp_path: Path
) -> None:
    host = toy_host("cpu:1GiB@1,cpu:1GiB@1", **ENGINE)
    apply(host, "defaults: {quotas: {devices: 1}}")
    first, second = host.client(user="ada"), host.client(user="ada")
    other = host.client(user="bob")
    go_on = tmp_path / "go-on"
    host.hold(first, go_on)
    second.add(1)
    found = queued(host, second)
    assert "ada has 1 of 1 device: waits until it is given back" in found["reason"]
    host.work(other)  # on the other device
    assert host.when(second, "queued")
    go_on.touch()
    assert second.read() == second.state


def test_a_cell_that_has_given_its_device_back_is_not_running(toy_host: StartHost) -> None:
    """Two sessions were shown as running where only one device may be held."""
    host = toy_host("cpu:1GiB@1,cpu:1GiB@1", **ENGINE)
    apply(host, "defaults: {quotas: {devices: 1}}")
    first, second = host.client(user="ada"), host.client(user="ada")
    with first.cell(), second.cell():
        first.add(1)
        assert first.read() == first.state
        assert host.when(first, "running")  # no other session wants the device
        second.add(1)
        assert second.read() == second.state
        assert host.when(second, "running")
        found = host.session(first)
        assert (found["state"], "runs on the CPU" in found["reason"]) == ("idle", True)
        first.add(2)
        assert first.read() == first.state
        assert host.when(second, "idle")


def test_a_raised_quota_lets_waiting_sessions_continue(toy_host: StartHost, tmp_path: Path) -> None:
    host = toy_host("cpu:1GiB@1,cpu:1GiB@1", **ENGINE)
    apply(host, "defaults: {quotas: {devices: 1}}")
    first, second = host.client(user="ada"), host.client(user="ada")
    host.hold(first, tmp_path / "go-on")
    second.add(1)
    queued(host, second)
    apply(host, "defaults: {quotas: {devices: 2}}")
    assert second.read() == second.state
    assert host.when(first, "running")
    (tmp_path / "go-on").touch()
    assert first.read() == first.state


def test_a_user_not_admitted_may_open_a_session_and_sees_the_reason(toy_host: StartHost) -> None:
    host = toy_host(**ENGINE)
    apply(host, f"{LAB}\nothers: {{admitted: false}}")
    eve, ada = host.client(user="eve"), host.client(user="ada")
    why = r"The policy does not let eve use devices\."
    for _ in range(2):
        with eve.cell(), pytest.raises(RuntimeError, match=why):
            eve.read()
    found = wait_until(lambda: host.when(eve, "suspended"))
    assert re.fullmatch(why, found["reason"])
    host.work(ada)
    with pytest.raises(ControlError, match=why):  # a program fails, and does not use the CPU
        host.call(OpenSession("program", "", sys.executable, script=True, user="eve"))
    apply(host, LAB)
    wait_until(lambda: eve.agent.presence != Presence.ENDED)
    eve.add(1)
    assert eve.read() == eve.state


def test_a_user_no_longer_admitted_sees_the_reason_while_waiting(toy_host: StartHost) -> None:
    """Nothing of its state is lost: it continues when it is admitted, also under another agent."""
    host = toy_host(**ENGINE)
    eve, ada = host.client(user="eve"), host.client(user="ada")
    host.work(eve)
    apply(host, f"{LAB}\nothers: {{admitted: false}}")
    host.work(ada)
    eve.add(5)
    with pytest.raises(RuntimeError, match="The policy does not let eve use devices"):
        eve.read()
    wait_until(lambda: host.when(eve, "suspended"))
    host.kill_agent()
    assert host.session(eve)["state"] == "suspended"
    with pytest.raises(RuntimeError, match="The policy does not let eve use devices"):
        eve.read()
    apply(host, LAB)
    wait_until(lambda: eve.agent.presence != Presence.ENDED)
    assert eve.read() == eve.state


def test_a_guarantee_is_kept_and_borrowers_lose_nothing(
    toy_host: StartHost, tmp_path: Path
) -> None:
    host = toy_host(**ENGINE)
    guest, ada = host.client(user="guest"), host.client(user="ada")
    with guest.cell():
        for number in range(1000):
            guest.add(number)
        guest.append(f"wait {tmp_path / 'go-on'}")
        for number in range(1000):
            guest.add(number)
        wait_until(lambda: host.when(guest, "running"))
        apply(
            host,
            "cluster: {devices_per_host: 1}\n"
            "virtual_clusters: {lab: {guaranteed_devices: 1, users: [ada]}}",
        )
        assert host.when(guest, "running")
        ada.add(1)
        queued(host, ada)  # until the current operator has ended
        (tmp_path / "go-on").touch()
        assert ada.read() == ada.state
        assert guest.read() == guest.state


def places(host: ToyHost, *clients: ToyClient) -> list[int]:
    """Return the queue positions of the waiting sessions, in ascending order."""
    found = [host.session(each)["queue_position"] for each in clients]
    waiting = [place for place in found if place is not None]
    assert len(waiting) == len(found)
    return sorted(waiting)


# -------------------------------------------------------------------- accounts


def served(user: str) -> float:
    """Return the recorded device seconds of a user."""
    found = decision_log.read_accounts(paths.runtime_dir())
    if found is None:
        return 0.0
    return sum(each["served"] for each in found.accounts["users"] if each["user"] == user)


def test_the_user_owed_most_is_first_after_a_controller_restart(
    toy_host: StartHost, tmp_path: Path
) -> None:
    host = toy_host(**ENGINE)
    rich, third, poor = (host.client(each, user=each) for each in ("rich", "third", "poor"))
    with rich.cell(), third.cell(), poor.cell():
        host.hold(rich, tmp_path / "rich")
        third.append(f"wait {tmp_path / 'third'}")
        queued(host, third)
        poor.add(1)
        queued(host, poor)
        wait_until(lambda: places(host, third, poor) == [1, 2])
        found = host.session(third)
        assert found["expected_wait"] is not None
        assert found["reason"].startswith("Waiting for Simulated GPU 0 (in use by rich). ")
        wait_until(lambda: served("rich") > 1)
        (tmp_path / "rich").touch()
        wait_until(lambda: host.when(third, "running"))
        rich.add(1)
        queued(host, rich)
        # Sessions are adopted, and request a device, in the order of their last changes: this one
        # is last.
        last = host.client("last", user="poor")
        last.add(1)
        queued(host, last)
        host.call(CloseSession(poor.session))
        wait_until(lambda: open_ones() == {each.session for each in (rich, third, last)})
        host.kill_agent()
        (tmp_path / "third").touch()
        for each in (rich, third, last):
            assert each.read() == each.state
    wait_until(lambda: all(after_restart(each) for each in (rich, third, last)))
    first = after_restart(last)[0].at
    assert first < after_restart(third)[0].at
    assert first < after_restart(rich)[0].at
    assert "The controller was restarted. The session continues." in decisions(rich, "restart")
    assert len(decisions(rich, "grant")) > len(after_restart(rich))  # the earlier ones are kept


def open_ones() -> set[str]:
    """Return the sessions with recorded accounts."""
    found = decision_log.read_accounts(paths.runtime_dir())
    return set() if found is None else {each["session"] for each in found.accounts["sessions"]}


def after_restart(client: ToyClient) -> list[decision_log.DecisionEntry]:
    """Return the grants of the restarted controller."""
    found = decision_log.read(paths.runtime_dir(), client.session, 1000)
    begun = [number for number, each in enumerate(found) if each.kind == "restart"]
    return [each for each in found[begun[-1] :] if each.kind == "grant"] if begun else []


def test_a_quota_of_device_memory_binds_and_locks_no_session_out(toy_host: StartHost) -> None:
    host = toy_host("cpu:256MiB@1", **ENGINE)
    client = host.client(user="ada")
    host.work(client, 150 * MIB)
    apply(host, LAB.replace("weight: 3}", "weight: 3, quotas: {device_memory: 100 MiB}}"))
    wait_until(lambda: client.agent.memory_quota == 100 * MIB)
    assert client.agent.memory_total == 100 * MIB
    assert wait_until(lambda: client.agent.memory_granted == 150 * MIB)  # its current memory
    assert not client.want(151 * MIB)
    host.call(Suspend(client.session))
    assert not client.want(151 * MIB)
    client.add(1)  # it is resumed with the memory that it has
    assert client.read() == client.state
    client.page.memory_used = 20 * MIB
    assert client.want(100 * MIB)
    assert not client.want(101 * MIB)
    host.work(client, 80 * MIB)
    # The quota counts all sessions of its user: the idle one is evicted.
    other = host.client("other", user="ada")
    assert other.want(60 * MIB)
    assert not other.want(101 * MIB)
    wait_until(lambda: host.when(client, "suspended"), 10)
    apply(host, LAB)
    assert other.want(200 * MIB)
    assert other.agent.memory_quota == 0
