"""``jupyter sing policy`` prints what users and programs expect."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jupyter_sing.cli import commands
from jupyter_sing.controller import policy_file
from jupyter_sing.scheduler.policy import document, parse
from jupyter_sing.scheduler.policy.yaml_reader import TEXT_BYTES_MAX
from tests.scheduler.policy_strategies import DOCS, EXAMPLES

LAB = str(DOCS / "policies" / "lab.yaml")
COURSE = str(DOCS / "policies" / "course.yaml")


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_are_ok(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(DOCS / "policies" / f"{example}.yaml")
    assert commands.main(["policy", "check", file]) == 0
    assert capsys.readouterr().out == f"{file}: ok\n"
    assert commands.main(["policy", "check", file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"message": "ok", "file": file}


@pytest.fixture
def wrong(tmp_path: Path) -> str:
    file = tmp_path / "wrong.yaml"
    file.write_text("defaults:\n  wieght: 2\n")
    return str(file)


@pytest.mark.parametrize("action", ["check", "show"])
def test_errors_are_one_line_and_status_1(
    action: str, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["policy", action, wrong]) == 1
    message = f"{wrong}: defaults.wieght: is no key here; did you mean weight? (line 2)"
    assert capsys.readouterr() == ("", f"jupyter sing: {message}\n")
    assert commands.main(["policy", action, wrong, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found == {"message": message, "reason": "bad-policy"}


def test_no_file_a_directory_and_an_endless_file_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "long").write_bytes(b"#" * (TEXT_BYTES_MAX + 1))
    for name in (tmp_path / "none", tmp_path, tmp_path / "long", "/dev/zero"):
        assert commands.main(["policy", "check", str(name)]) == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert str(name) in err


@pytest.mark.parametrize("arguments", [["policy"], ["policy", "check"], ["policy", "frobnicate"]])
def test_other_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        commands.main(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_a_policy_is_shown_in_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["policy", "show", LAB]) == 0
    assert (
        capsys.readouterr().out
        == """\
cluster: 1 host of 4 devices

tier      guaranteed GPU time  suspended after  hibernated after  longest hold
premium   90 %                 10 min           never             unlimited
standard  60 %                 10 min           never             unlimited
basic     none                 2 min            never             30 min

On 4 devices, 61 premium or 114 standard sessions can have that guarantee at the same time.
Further sessions run without a guarantee. Their status shows it.

jobs: grow onto idle devices after 30 s

virtual cluster  guaranteed  weight  all together
lab              nothing     1       unlimited
default          nothing     1       unlimited

virtual cluster  users                         terms
lab              grace                         tier premium, devices at once 3
lab              robot                         tier basic, devices at once 4, GPU-hours a day 24
lab              ada
lab              staff: edsger, barbara, dr-*  weight 2
lab              students: s[0-9]*
default          others                        tier basic, devices at once 1, GPU-hours a day 2
                 all users                     packing allowed, devices at once 2, disk 200 GiB
"""
    )


def test_guarantees_and_strangers_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["policy", "show", COURSE]) == 0
    out = capsys.readouterr().out
    assert "teaching         2 devices   1       unlimited\n" in out
    assert "course           nothing     1       devices at once 6\n" in out
    assert "others                 not admitted\n" in out
    assert commands.main(["policy", "show", str(DOCS / "policies" / "departments.yaml")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("cluster: 1 x rack\n")
    assert "biology          1 x rack.node.switch, pinned near-scanner  1 " in out


def test_long_lists_of_names_are_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "many.yaml"
    file.write_text("virtual_clusters: {a: {users: [a, b, c, d, e, f, {name: g, weight: 2}]}}")
    assert commands.main(["policy", "show", str(file)]) == 0
    assert "a                a, b, c, d, 2 more\n" in capsys.readouterr().out


def test_without_a_file_what_holds_is_shown(
    runtime_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["policy", "show"]) == 0
    out = capsys.readouterr().out
    assert "standard  70 %                 10 min           never             unlimited" in out
    assert commands.main(["policy", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"policy": {}}
    policy_file.keep(runtime_dir, "defaults: {weight: 2}")
    assert commands.main(["policy", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"policy": {"defaults": {"weight": 2}}}
    assert commands.main(["policy", "show", "--user", "ada"]) == 0
    assert re.search(r"weight +2 +defaults.weight \(line 1\)", capsys.readouterr().out)
    assert not (runtime_dir / "agent.sock").exists()
    policy_file.keep(runtime_dir, "nonsense: 1")
    assert commands.main(["policy", "show"]) == 1
    assert "The policy that was applied: nonsense: is no key" in capsys.readouterr().err


def test_programs_get_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["policy", "show", COURSE, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["policy"]
    policy = parse(EXAMPLES["course"])
    assert found == document(policy)
    assert parse(json.dumps(found)) == policy


def test_a_user_is_shown_with_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["policy", "show", COURSE, "--user", "2026017"]) == 0
    line = EXAMPLES["course"].split("\n").index("        gpu_hours_per_day: 4") + 1
    out = capsys.readouterr().out
    assert out.startswith("2026017, of group students\n")
    assert (
        "GPU-hours a day      4        "
        f"virtual_clusters.course.each.quotas.gpu_hours_per_day (line {line})\n"
    ) in out
    assert "weight               1        built in\n" in out
    assert commands.main(["policy", "show", COURSE, "--user", "2026017", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tier"], found["quotas"]["devices"], found["terms"]["max_hold"]) == (
        "basic",
        1,
        300,
    )
    assert found["cluster_quotas"]["disk"] is None
    assert {"key": "weight", "path": None, "line": None} in found["decided"]


def test_a_refused_user_is_shown_the_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["policy", "show", COURSE, "--user", "eve"]) == 0
    assert capsys.readouterr().out == "eve is not admitted: others.admitted is false.\n"
