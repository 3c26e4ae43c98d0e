"""`jupyter sing simulate` prints what its interface specifies, or one line with the error."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from jupyter_sing.cli import commands, progress
from tests.scheduler.simulator.test_simulator_report import NAMED

ROWS = """session,num_gpu,start_min,dur_min,memory_gb
a,1,0,10,8
b,1,1,0.5,8
a,1,30,70,8
"""


@pytest.fixture
def rows(tmp_path: Path) -> str:
    file = tmp_path / "rows.csv"
    file.write_text(ROWS, "utf-8")
    return str(file)


def test_json_is_that_of_the_interface(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        commands.main(["simulate", "--workload", rows, "--gpus", "1", "--baselines", "--json"]) == 0
    )
    printed = capsys.readouterr().out
    found = json.loads(printed)
    assert [found[key] for key in ("sessions", "cells", "gpus")] == [2, 3, 1]
    names = ["sing", "reserve", "cull30", "fcfs", "nvshare", "las"]
    assert [result["scheduler"] for result in found["results"]] == names
    for result in found["results"]:
        assert tuple(result)[: len(NAMED)] == NAMED
    by_name = {result["scheduler"]: result for result in found["results"]}
    # a loads 8 GB first, and so does b when a has ended.
    assert by_name["fcfs"]["ttg_p99"] == pytest.approx(540 + 0.5 + 0.5)
    assert by_name["sing"]["ttg_p99"] < 10  # it preempts a, which continues later
    assert (
        commands.main(["simulate", "--workload", rows, "--gpus", "1", "--baselines", "--json"]) == 0
    )
    assert capsys.readouterr().out == printed


def test_users_get_a_table(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["simulate", "--workload", rows, "--gpus", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 sessions, 3 cells, 2 devices, offered load 40 %"
    assert lines[2].startswith("scheduler  TTG p50")
    assert lines[3].startswith("sing")
    assert len(lines) == 4


def test_switching_takes_the_documented_time(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--workload", rows, "--gpus", "2", "--json"]
    assert commands.main([*arguments, "--switch", "3", "--bandwidth", "4"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["results"]
    assert found["ttg_p50"] == pytest.approx(3 + 8 / 4)


def test_the_plot_is_written(rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = tmp_path / "ttg.svg"
    arguments = ["simulate", "--workload", rows, "--gpus", "1", "--plot", str(drawn)]
    assert commands.main(arguments) == 0
    capsys.readouterr()
    assert ElementTree.parse(drawn).getroot().tag.endswith("svg")


def test_pods_of_openb_are_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Path(__file__).parents[1] / "openb" / "openb_gpu_pods.csv"
    lines = source.read_text("utf-8").splitlines(keepends=True)
    file = tmp_path / "pods.csv"
    file.write_text("".join(lines[:80]), "utf-8")
    arguments = ["simulate", "--workload", str(file), "--gpus", "64", "--baselines", "--json"]
    assert commands.main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sessions"] == found["cells"] > 50
    assert all(result["utilisation"] > 0 for result in found["results"])


@pytest.mark.slow
def test_the_generator_is_a_workload(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--workload", "generator", "--gpus", "71", "--seed", "3", "--json"]
    assert commands.main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["sessions"], found["cells"]) == (71, 7581)
    assert found["results"][0]["short_cells_within_1s"] > 0.98


@pytest.mark.parametrize(
    ("content", "gpus", "says"),
    [
        (
            b"a,b\n",
            1,
            "line 1: the header must be session,num_gpu,start_min,dur_min[,memory_gb[,min_gpu]]",
        ),
        (b"", 1, "line 1: the header must be"),
        (ROWS.encode() + b"c,x,0,1,8\n", 1, "line 5: num_gpu must be a number from 0, not 'x'"),
        (ROWS.encode() + b"c,1,0,1\n", 1, "line 5: 5 fields are needed, there are 4"),
        (b"session,\xff\xfe\n", 1, "not UTF-8 text"),
        (b"x" * 20_000, 1, "line 1: it is longer than 10000 characters"),
        (b"session,num_gpu,start_min,dur_min\na,4,0,1\n", 2, "a needs 4 devices of 2"),
        (ROWS.encode() + b"c,1,0,1,80\n", 1, "c needs 80.0 GB of a device, which has 24.0"),
        (b"session,num_gpu,start_min,dur_min\na,1,0,1\x00\n", 1, "line 2: dur_min must be"),
    ],
)
def test_hostile_files_give_one_line(
    content: bytes, gpus: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "hostile.csv"
    file.write_bytes(content)
    arguments = ["simulate", "--workload", str(file), "--gpus", str(gpus)]
    assert commands.main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert says in printed.err
    assert len(printed.err.splitlines()) == 1
    assert commands.main([*arguments, "--json"]) == 1
    assert says in json.loads(capsys.readouterr().out)["message"]


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["simulate", "--workload", str(tmp_path / "none"), "--gpus", "1"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workload", "generator"],
        ["--gpus", "1"],
        ["--workload", "generator", "--gpus", "0"],
        ["--workload", "generator", "--gpus", "1e9"],
        ["--workload", "generator", "--gpus", "9" * 5000],
        ["--workload", "generator", "--gpus", "6", "--memory", "0"],
        ["--workload", "generator", "--gpus", "6", "--memory", "inf"],
        ["--workload", "generator", "--gpus", "6", "--bandwidth", "nan"],
        ["--workload", "generator", "--gpus", "6", "--switch", "-1"],
        ["--workload", "generator", "--gpus", "6", "--seed", "x"],
    ],
)
def test_wrong_arguments_are_a_matter_of_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        commands.main(["simulate", *arguments])
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_progress_is_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SHOWN_AFTER_SECONDS", 0.0)
    with progress.ProgressLine("Simulating") as line:
        line.show_share(1, 3)
        assert capsys.readouterr().err == ""  # not a terminal
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        line.show_share(1, 3)
        line.show_share(0, 0)
    expected = f"\r\x1b[KSimulating [{'#' * 6}{'.' * 14}] 33 %\r\x1b[K"
    assert capsys.readouterr().err == expected
