"""The effect of a policy on the sessions of a workload."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jupyter_sing.cli import commands
from jupyter_sing.scheduler.engine import Engine
from jupyter_sing.scheduler.policy import parse
from jupyter_sing.scheduler.settings import QuotaLimits, Tier
from jupyter_sing.simulator.cluster import SimulatedCluster, SimulationError
from jupyter_sing.simulator.run import SimulatedTerms, Simulation
from jupyter_sing.simulator.users import described, simulated_policy
from jupyter_sing.simulator.workload import arranged
from tests.scheduler.simulated import Audit, chance, ends, instant, session, waits

POLICIES = Path(__file__).resolve().parents[3] / "docs" / "policies"

TEXT = """
cluster: {devices_per_host: 2}
virtual_clusters:
  physics:
    guaranteed_devices: 1
    weight: 2
    users:
      - {name: ada, tier: premium, weight: 3}
    groups:
      students: {members: ["s*"], tier: basic}
  biology:
    guaranteed_devices: 1
    users: [rosalind]
others: {admitted: false}
"""


def test_sessions_are_those_of_their_users_or_go_around() -> None:
    policy = parse(TEXT)
    names = ["ada/x", "a", "b", "c", "d", "rosalind/y"]
    workload = arranged(session(name, (i, 1)) for i, name in enumerate(names))
    found = simulated_policy(policy, workload, instant(2).devices())
    assert dict(found.terms) == {
        "ada/x": SimulatedTerms("physics", "ada", Tier.PREMIUM, 3.0),
        "a": SimulatedTerms("physics", "ada", Tier.PREMIUM, 3.0),
        "b": SimulatedTerms("physics", "s* b", Tier.BASIC, 1.0),  # a user whom the pattern matches
        "c": SimulatedTerms("biology", "rosalind", Tier.STANDARD, 1.0),
        "d": SimulatedTerms("physics", "ada", Tier.PREMIUM, 3.0),
        "rosalind/y": SimulatedTerms("biology", "rosalind", Tier.STANDARD, 1.0),
    }
    assert found.settings.vc_weights == {"physics": 2.0, "biology": 1.0}
    assert found.settings.user_weights["physics", "ada"] == 3.0
    assert found.of(workload.sessions[0]) == found.terms["ada/x"]


def test_users_not_admitted_are_named() -> None:
    workload = arranged([session("eve/x", (0, 1))])
    with pytest.raises(SimulationError, match="does not admit eve"):
        simulated_policy(parse(TEXT), workload, instant(2).devices())


def test_a_policy_without_names_makes_everybody_a_user() -> None:
    workload = arranged([session("a", (0, 1)), session("b", (1, 1))])
    found = simulated_policy(parse("defaults: {tier: basic}"), workload, instant(2).devices())
    assert {terms.user for terms in found.terms.values()} == {"a", "b"}
    assert {terms.tier for terms in found.terms.values()} == {Tier.BASIC}
    assert found.leases is None


def test_devices_must_do_for_the_guarantees() -> None:
    workload = arranged([session("ada/x", (0, 1))])
    with pytest.raises(SimulationError, match="too few for the policy"):
        simulated_policy(parse(TEXT), workload, instant(1).devices())


def test_a_guaranteed_device_is_given_back_when_it_is_wanted() -> None:
    # ada computes on both devices, on biology's only while biology does not want it.
    workload = arranged(
        [
            session("ada/x", (0, 1000)),
            session("ada/y", (0, 1000)),
            session("rosalind/z", (100, 1000)),
        ]
    )
    cluster = instant(2)
    simulated = simulated_policy(parse(TEXT), workload, cluster.devices())
    audit = Audit(Engine(cluster.devices(), simulated.settings, simulated.leases))
    outcome = Simulation(workload, cluster, audit, simulated.of).run()
    assert waits(outcome, "rosalind/z") == [pytest.approx(0.0, abs=2.0)]
    assert ends(outcome, "rosalind/z")[0] == pytest.approx(1100.0, abs=2.0)
    assert {record.vc for record in outcome.sessions} == {"physics", "biology"}


def test_nothing_is_lost_under_guarantees() -> None:
    workload = chance(4, sessions=20)
    policy = parse(TEXT.replace("devices_per_host: 2", "devices_per_host: 3"))
    cluster = SimulatedCluster(3, switch=0.5)
    simulated = simulated_policy(policy, workload, cluster.devices())
    engine = Engine(cluster.devices(), simulated.settings, simulated.leases)
    outcome = Simulation(workload, cluster, engine, simulated.of).run()
    assert len(outcome.cells) == workload.cells
    assert outcome.executed == pytest.approx(workload.work)


def test_devices_have_the_names_that_the_policy_gives_them() -> None:
    policy = parse((POLICIES / "departments.yaml").read_bytes())
    names = described(policy)
    assert (len(names), names[0], names[-1]) == (32, ("gpu1", "gpu1/0"), ("gpu4", "gpu4/7"))
    cluster = SimulatedCluster(32, names=names)
    workload = arranged([session(f"s{i}", (i, 5)) for i in range(6)])
    simulated = simulated_policy(policy, workload, cluster.devices())
    engine = Engine(cluster.devices(), simulated.settings, simulated.leases)
    assert len(Simulation(workload, cluster, engine, simulated.of).run().cells) == 6


@pytest.fixture
def rows(tmp_path: Path) -> str:
    file = tmp_path / "rows.csv"
    file.write_text("session,num_gpu,start_min,dur_min\na,1,0,3\nb,1,1,0.5\n", "utf-8")
    return str(file)


def test_a_policy_on_the_command_line(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    lab = str(POLICIES / "lab.yaml")
    arguments = ["simulate", "--workload", rows, "--gpus", "1", "--baselines", "--policy", lab]
    assert commands.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["results"]) == 6
    assert "idle times" in found["note"]
    assert commands.main(arguments) == 0
    assert "Of the policy, packing, idle times" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense: 1", "nonsense"),
        ((POLICIES / "departments.yaml").read_text("utf-8"), "it describes 32 devices, not 1"),
        ("others: {admitted: false}", "The policy does not admit a"),
    ],
)
def test_a_policy_that_does_not_suit_gives_one_line(
    text: str, says: str, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(text, "utf-8")
    arguments = ["simulate", "--workload", rows, "--gpus", "1", "--policy", str(file)]
    assert commands.main(arguments) == 1
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1


def test_quotas_holds_and_percentages_are_those_of_the_policy() -> None:
    policy = parse((POLICIES / "lab.yaml").read_text("utf-8"))
    names = ["ada/x", "grace/x", "robot/x", "eve/x"]
    workload = arranged(session(name, (0, 1)) for name in names)
    found = simulated_policy(policy, workload, instant(4).devices()).settings
    assert found.user_limits["lab", "ada"] == QuotaLimits(devices=2)
    assert found.user_limits["lab", "grace"] == QuotaLimits(devices=3)
    assert found.user_limits["lab", "robot"] == QuotaLimits(devices=4, gpu_seconds_per_day=86_400.0)
    assert found.user_limits["default", "eve"] == QuotaLimits(
        devices=1, gpu_seconds_per_day=7_200.0
    )
    assert found.targets == {Tier.PREMIUM: 0.9, Tier.STANDARD: 0.6, Tier.BASIC: 0.0}
    assert found.max_hold == {Tier.BASIC: 1800.0}


def test_a_workload_that_the_policy_never_serves_ends_with_the_reason() -> None:
    policy = parse("defaults: {quotas: {devices: 0}}")
    workload = arranged([session("eve/x", (0, 1))])
    simulated = simulated_policy(policy, workload, instant(1).devices())
    engine = Engine(instant(1).devices(), simulated.settings)
    with pytest.raises(SimulationError, match="The policy does not let eve use devices"):
        Simulation(workload, instant(1), engine, simulated.of).run()
