"""The effect of a policy on a host: on sessions, the engine, and the agent."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_sing.controller import policy_file
from jupyter_sing.controller.effective_policy import EffectiveTerms, HostPolicy
from jupyter_sing.scheduler.hived import HivedGuarantees
from jupyter_sing.scheduler.no_guarantees import NoGuarantees
from jupyter_sing.scheduler.settings import EngineSettings, QuotaLimits, Tier
from kernelproxy.common.errors import ControlError
from kernelproxy.common.scheduler_api import Allowance
from tests.scheduler.policy_strategies import EXAMPLES

TWO = {"here": ["cpu:0", "cpu:1"]}
GIB = 1 << 30

LAB = """
tiers:
  basic: {suspend_after: 2 min, max_hold: 5 min}
  standard: {gpu_percent: 50}
defaults: {tier: standard, packing: true}
virtual_clusters:
  lab:
    weight: 3
    quotas: {devices: 2, disk: 1 GiB}
    users:
      - {name: ada, tier: premium, weight: 2, quotas: {gpu_hours_per_day: 2, device_memory: 1 GiB}}
      - {name: bob, quotas: {disk: 5 GiB}}
others: {admitted: false}
"""


def test_without_a_policy_everybody_is_equal() -> None:
    rules, base = HostPolicy("", TWO), EngineSettings(throttle=3.0)
    assert rules.standing("ada", None) == EffectiveTerms("default", Tier.STANDARD, False, 1.0)
    assert rules.settings(base, ["ada"]) is base
    assert rules.allowance("ada", Tier.STANDARD) == Allowance(tier="standard")
    assert rules.notes() == []
    assert isinstance(rules.guarantees(), NoGuarantees)


@pytest.mark.parametrize(
    ("user", "requested", "tier"),
    [
        ("ada", None, Tier.PREMIUM),
        ("ada", "premium", Tier.PREMIUM),
        ("ada", "basic", Tier.BASIC),
        ("bob", "premium", Tier.STANDARD),
        ("bob", "standard", Tier.STANDARD),
        ("bob", "basic", Tier.BASIC),
    ],
)
def test_a_requested_tier_is_limited_by_the_policy(
    user: str, requested: str | None, tier: Tier
) -> None:
    found = HostPolicy(LAB, TWO).standing(user, requested)
    assert (found.tier, found.vc, found.may_pack) == (tier, "lab", True)


def test_the_engine_gets_the_numbers() -> None:
    found = HostPolicy(LAB, TWO).settings(EngineSettings(throttle=3.0), ["ada", "bob", "eve"])
    assert found.throttle == 3.0
    assert found.user_weights == {("lab", "ada"): 2, ("lab", "bob"): 1, ("default", "eve"): 1}
    assert found.vc_weights == {"lab": 3, "default": 1}
    assert found.user_limits == {
        ("lab", "ada"): QuotaLimits(device_memory=GIB, gpu_seconds_per_day=7200.0),
        ("lab", "bob"): QuotaLimits(),
        ("default", "eve"): QuotaLimits(devices=0),  # not admitted
    }
    assert found.vc_limits == {"lab": QuotaLimits(devices=2), "default": QuotaLimits()}
    assert found.targets == {Tier.PREMIUM: 0.95, Tier.STANDARD: 0.5, Tier.BASIC: 0.0}
    assert found.max_hold == {Tier.BASIC: 300.0}


@pytest.mark.parametrize(
    ("policy", "seconds"),
    [
        ("{}", 30.0),
        ("jobs: {grow_after: 2 min}", 120.0),
        ("jobs: {grow_after: 0 s}", 0.0),
        ("jobs: {grow_after: never}", math.inf),
    ],
)
def test_the_engine_gets_the_growth_of_jobs(policy: str, seconds: float) -> None:
    assert HostPolicy(policy, TWO).settings(EngineSettings(), ["ada"]).grow_after == seconds


def test_the_agent_is_notified_of_the_policys_values_and_nothing_else() -> None:
    rules = HostPolicy(LAB, TWO)
    assert rules.allowance("ada", Tier.PREMIUM) == Allowance(
        None, None, GIB, "premium", device_memory=GIB
    )
    assert rules.allowance("bob", Tier.BASIC) == Allowance(
        120.0, None, GIB, "basic", device_memory=math.inf
    )
    never = HostPolicy("tiers: {standard: {suspend_after: never}}", TWO)
    assert never.allowance("ada", Tier.STANDARD) == Allowance(
        math.inf, None, math.inf, "standard", device_memory=math.inf
    )


@pytest.mark.parametrize("name", ["laptop", "lab", "course"])
def test_examples_hold_on_two_devices(name: str) -> None:
    rules = HostPolicy(EXAMPLES[name], TWO)
    assert isinstance(rules.guarantees(), HivedGuarantees if name == "course" else NoGuarantees)
    if name == "laptop":
        assert rules.notes() == []
        return
    (note,) = rules.notes()
    assert note == (
        f"The policy describes {'2 hosts' if name == 'course' else '1 host'} of 4 devices, and "
        "this daemon has 2 devices (cpu:0, cpu:1): everything else in it holds. To describe "
        "these, write cluster: {devices_per_host: 2}."
    )
    four = {"here": ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]}
    assert (HostPolicy(EXAMPLES["lab"], four).notes() == []) is True


def test_guarantees_beyond_the_devices_are_refused_with_numbers() -> None:
    with pytest.raises(ControlError) as raised:
        HostPolicy(EXAMPLES["course"], {"here": ["cpu:0"]})
    assert raised.value.reason == "bad-policy"
    assert raised.value.message == (
        "cluster: This daemon has 1 device (cpu:0), too few for what is guaranteed. Virtual "
        "clusters are promised 2 devices, and there are 1. Guarantee less, or describe these by "
        "cluster: {devices_per_host: 1}."
    )
    with pytest.raises(ControlError, match="It describes 32 devices of gpu1, gpu2, gpu3, gpu4"):
        HostPolicy(EXAMPLES["departments"], TWO)
    HostPolicy(EXAMPLES["departments"], TWO, guarantee=False)


def test_cells_of_one_host_are_this_host() -> None:
    cells = """
    cluster:
      cell_types: {box: {child_cell_type: gpu, child_cell_number: 2, is_node_level: true}}
      physical_cells: [{cell_type: box, cell_address: anything}]
    virtual_clusters: {vision: {guaranteed_cells: [{cell_type: box}], users: [ada]}}
    """
    rules = HostPolicy(cells, TWO)
    found = rules.guarantees()
    assert isinstance(found, HivedGuarantees)
    assert sorted(found.cluster.devices) == ["cpu:0", "cpu:1"]
    assert found.free("vision") == 2
    assert rules.notes() == []


def test_no_policy_is_one_line() -> None:
    with pytest.raises(ControlError) as raised:
        HostPolicy("defaults:\n  wieght: 2\n", TWO)
    assert raised.value.reason == "bad-policy"
    assert raised.value.message == "defaults.wieght: is no key here; did you mean weight? (line 2)"


# -------------------------------------------------------------------- persistence


def test_a_saved_policy_applies_to_the_next_daemon(tmp_path: Path) -> None:
    assert policy_file.begin(tmp_path, TWO).text == ""
    policy_file.keep(tmp_path, "defaults: {weight: 2}")
    policy_file.keep(tmp_path, LAB)
    assert policy_file.begin(tmp_path, TWO).text == policy_file.kept(tmp_path) == LAB
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_policy_that_cannot_be_saved_is_an_error(tmp_path: Path) -> None:
    (tmp_path / policy_file.NAME).mkdir()
    with pytest.raises(ControlError, match="cannot be kept"):
        policy_file.keep(tmp_path, LAB)
    assert [each.name for each in tmp_path.iterdir()] == [policy_file.NAME]
    with pytest.raises(ControlError, match="cannot be read"):
        policy_file.kept(tmp_path)


def test_the_file_of_the_environment_counts_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime, file = tmp_path / "runtime", tmp_path / "site.yaml"
    runtime.mkdir()
    monkeypatch.setenv(policy_file.VARIABLE, str(file))
    with pytest.raises(ControlError, match=r"JUPYTER_SING_POLICY: .*site.yaml: .*No such file"):
        policy_file.begin(runtime, TWO)
    file.write_text(LAB)
    assert policy_file.begin(runtime, TWO).text == policy_file.kept(runtime) == LAB
    policy_file.keep(runtime, "defaults: {weight: 2}")
    assert policy_file.begin(runtime, TWO).text == LAB
    # A policy file that is invalid now must not end sessions.
    file.write_text("nonsense: 1")
    assert policy_file.begin(runtime, TWO).text == LAB
    assert "The policy that was applied last holds" in caplog.text
    monkeypatch.setenv(policy_file.VARIABLE, "site.yaml")
    assert policy_file.begin(runtime, TWO).text == LAB
    assert "must be absolute" in caplog.text


def test_a_saved_policy_beyond_the_devices_guarantees_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy_file.keep(tmp_path, EXAMPLES["course"])
    rules = policy_file.begin(tmp_path, {"here": ["cpu:0"]})
    assert rules.standing("2026017", None).tier is Tier.BASIC
    assert isinstance(rules.guarantees(), NoGuarantees)
    assert "cannot hold: cluster: This daemon has 1 device" in caplog.text
    policy_file.keep(tmp_path, "nonsense: 1")
    assert policy_file.begin(tmp_path, TWO).text == ""


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("", ""),
        ("{}", ""),
        ("others: {admitted: false}", "The policy does not let eve use devices."),
        ("defaults: {quotas: {devices: 0}}", "The policy does not let eve use devices."),
        ("defaults: {quotas: {gpu_hours_per_day: 0}}", "The policy gives eve no device time."),
        (
            "virtual_clusters: {lab: {users: [eve], quotas: {devices: 0}}}",
            "The policy does not let virtual cluster lab use devices.",
        ),
        ("virtual_clusters: {lab: {users: [eve]}}\nothers: {admitted: false}", ""),
    ],
)
def test_a_user_without_devices_gets_the_reason(policy: str, why: str) -> None:
    assert HostPolicy(policy, TWO).denied("eve") == why


def test_optional_packages_are_not_loaded_by_the_daemon_or_the_command_line() -> None:
    program = (
        "import sys, jupyter_sing.controller.controller, jupyter_sing.cli.commands\n"
        "print(*sorted(sys.modules))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "jupyter_sing.scheduler.engine" in loaded
    optional = ("pydantic", "yaml", "jupyter_sing.scheduler.hived", "jupyter_sing.simulator")
    assert [name for name in loaded if name.startswith(optional)] == []
