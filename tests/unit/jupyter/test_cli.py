"""`jupyter sing` prints what users and programs expect, and its exit status reports success."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jupyter_sing.cli import commands, program, progress
from kernelproxy.agent.status.activity_store import ActivityStore
from kernelproxy.agent.status.timeline import Change
from kernelproxy.common.errors import ControlError
from kernelproxy.common.protocol import (
    Checkpoint,
    CloseSession,
    LastCheckpoint,
    OpenSession,
    Progress,
    Restore,
    SetPolicy,
    Stop,
    Suspend,
)
from kernelproxy.common.protocol.views import LastCheckpointView
from tests.unit.fake_daemon import (
    AFFECTED,
    CHECKPOINT,
    DEVICE,
    NOTES,
    OUTCOME,
    SESSION,
    FakeDaemon,
)


@pytest.mark.parametrize("verb", ["status", "devices"])
def test_lists_are_empty_without_a_daemon_and_start_none(
    verb: str, runtime_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main([verb, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == []
    assert found.get("sessions", []) == []
    assert not (runtime_dir / "agent.sock").exists()


def test_status_shows_the_daemons_reply(
    fake_daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"devices": [DEVICE], "sessions": [SESSION]}
    assert commands.main(["status"]) == 0
    assert "digits.ipynb  Idle" in capsys.readouterr().out


def test_activity_is_shown_as_text_and_as_json(
    runtime_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["activity"]) == 0
    assert capsys.readouterr().out == "No GPU was used in that time.\n"
    now = time.time()
    record = ActivityStore(runtime_dir)
    devices = [(each, "software", 1 << 30) for each in ("cpu:0", "cpu:1")]
    record.begin(now - 7200, devices, kept=False)
    record.opened("a", os.getuid(), "ada", "digits.ipynb")
    record.changed(Change(now - 3600, "a", "cpu:0", "queued"))
    record.changed(Change(now - 3500, "a", "cpu:0", "running"))
    record.used(now - 3500, "cpu:0", 512 << 20)
    record.executed(now - 3400, "a", "cpu:0", 0.5)
    record.changed(Change(now - 3000, "a", "cpu:0", "suspended"))
    record.happened(now - 3000, "suspended", "a", "cpu:0", "Not used for 10 minutes.")
    record.close(now)
    assert commands.main(["activity"]) == 0
    text = capsys.readouterr().out
    used = "executed for 0.5 s, peak memory 512.0 MiB of 1.0 GiB, longest queue 1"
    assert f"Simulated GPU 0 (cpu:0): {used}\n" in text
    assert "500.0 s  running  digits.ipynb  ada\n" in text
    assert "peak memory 0 B of 1.0 GiB, longest queue 0\nNot used.\n" in text
    assert "digits.ipynb on Simulated GPU 0: Not used for 10 minutes.\n" in text
    assert commands.main(["activity", "--json", "--hours", "0.5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["held"] for each in found["devices"]] == [[], []]
    for hours in ("0", "-1", "nan", "x"):
        with pytest.raises(SystemExit):
            commands.main(["activity", "--hours", hours])


def test_status_shows_queue_positions(
    fake_daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_daemon.sessions[SESSION["id"]] |= {"state": "queued", "queue_position": 2}
    assert commands.main(["status"]) == 0
    assert "digits.ipynb  Queued, place 2" in capsys.readouterr().out


def test_migrate_shows_duration_and_downtime(
    fake_daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["migrate", SESSION["id"], "cpu:1"]) == 0
    assert capsys.readouterr().out == (
        "digits.ipynb: Now on Simulated GPU 1. Moved in 0.5 s, paused for 0.020 s.\n"
    )
    assert commands.main(["migrate", SESSION["id"], "cpu:7"]) == 1
    assert "no device cpu:7" in capsys.readouterr().err


def test_pin_and_priority_are_set_and_shown(
    fake_daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    name = SESSION["id"]
    for arguments, line in (
        (["pin", name], "Pinned: its memory stays on Simulated GPU 0."),
        (["pin", name], "Pinned: its memory stays on Simulated GPU 0."),
        (["priority", name], "Priority: default"),
        (["priority", name, "basic"], "Priority: basic"),
        (["priority", "digits.ipynb"], "Priority: basic"),
        (
            ["deterministic", name],
            "Not deterministic: on a GPU, a recovery is approximate for some operations.",
        ),
        (
            ["deterministic", name, "on"],
            "Deterministic: a recovery is exact, and some operations are slower.",
        ),
        (["unpin", name], "Not pinned: its memory may leave the GPU when other sessions need it."),
    ):
        assert commands.main(arguments) == 0
        assert capsys.readouterr().out == f"digits.ipynb: {line}\n"
    assert commands.main(["pin", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pinned"] is True
    assert commands.main(["status"]) == 0
    assert "Simulated GPU 0 (cpu:0), pinned" in capsys.readouterr().out
    assert commands.main(["priority", name[:4], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["priority"] == "basic"
    for arguments, text in (
        (["priority", name, "premium"], "Premium is for others."),
        (["priority", "nobody"], "There is no session 'nobody'."),
        (["pin", "nobody"], "There is no session nobody."),
    ):
        assert commands.main(arguments) == 1
        assert capsys.readouterr().err == f"jupyter sing: {text}\n"
    with pytest.raises(SystemExit) as usage:
        commands.main(["priority", name, "best"])
    assert usage.value.code == 2


def test_suspend_shows_the_new_state(
    fake_daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["suspend", SESSION["id"]]) == 0
    expected = "digits.ipynb: Suspended by jupyter sing suspend. Resumes when you run a cell.\n"
    assert capsys.readouterr().out == expected
    assert isinstance(fake_daemon.requests[-1], Suspend)
    assert commands.main(["resume", SESSION["id"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "idle"


def test_checkpoints_are_saved_listed_restored_and_deleted(
    fake_daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (["--name", "mine"], ["mine"]):  # as passed by the magic
        capsys.readouterr()
        assert commands.main(["checkpoint", SESSION["id"], *name]) == 0
        request = fake_daemon.requests[-1]
        assert isinstance(request, Checkpoint)
        assert request.name == "mine"
    assert capsys.readouterr().out == (
        "Saved checkpoint mine: 1 variable and 2 files, 3.0 MiB (1.0 MiB on disk)\n"
        "  saved only with the process: lines, lock\n"
        "  not saved: /home/ada/big.csv: it is too large\n"
    )
    assert commands.main(["checkpoints"]) == 0
    out = capsys.readouterr().out
    assert "you         whole process" in out
    assert "digits.ipynb: 1 variable and 2 files, 1 not saved" in out
    assert "Its hash is wrong." in out
    assert commands.main(["restore", "before-lunch"]) == 0
    assert fake_daemon.requests[-1] == Restore(SESSION["id"], "before-lunch")  # the same kernel's
    assert capsys.readouterr().out == (
        "Restored 2 variables and 1 file from before-lunch\n"
        "  renamed: /home/ada/table.csv is now /data/aside/before-lunch/home/ada/table.csv\n"
        "  not restored: frame: there is no module pandas\n"
    )
    assert commands.main(["restore", "before-lunch", "--session", "other", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == OUTCOME
    assert fake_daemon.requests[-1] == Restore("other", "before-lunch")
    assert commands.main(["checkpoint-delete", "before-lunch"]) == 0
    assert commands.main(["checkpoint", SESSION["id"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out.split("\n", 1)[1]) == CHECKPOINT
    for arguments, text in (
        (["restore", "none"], "no checkpoint 'none'"),
        (["restore", "torn"], "Its hash is wrong"),
        (["checkpoint-delete", "none"], "no checkpoint 'none'"),
    ):
        assert commands.main(arguments) == 1
        assert text in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["checkpoint", "restore"])
def test_progress_is_shown_to_terminals_only(
    verb: str,
    fake_daemon: FakeDaemon,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(progress, "SHOWN_AFTER_SECONDS", 0.0)
    fake_daemon.progress = [Progress(0, 0), Progress(1 << 20, 2 << 20)]
    of = SESSION["id"] if verb == "checkpoint" else "before-lunch"
    assert commands.main([verb, of]) == 0
    assert "[##########..........] 1.0 MiB of 2.0 MiB" in capsys.readouterr().err
    assert commands.main([verb, of, "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_refusal_is_one_line_and_exit_status_1(
    fake_daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["suspend", "nobody"]) == 1
    assert capsys.readouterr().err == "jupyter sing: There is no session nobody.\n"
    assert commands.main(["suspend", "--json", "nobody"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found == {"message": "There is no session nobody.", "reason": "unknown-session"}


def test_verbs_without_a_daemon_report_that_none_runs(
    runtime_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["suspend", "anything"]) == 1
    assert "No jupyter_sing daemon is running" in capsys.readouterr().err


def test_wrong_usage_is_exit_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.main(["suspend"])
    assert ended.value.code == 2
    assert "usage: jupyter sing" in capsys.readouterr().err


def test_stop_saves_notebooks_and_lists_them(
    fake_daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["stop"]) == 0
    assert fake_daemon.requests[-1] == Stop(checkpoint=True)
    assert capsys.readouterr().out == (
        "Saved checkpoint digits-auto.\n"
        "  not saved: maths.ipynb: it was busy for 30 s.\n"
        "Stopped the daemon and its sessions.\n"
    )
    assert commands.main(["stop", "--no-checkpoint", "--json"]) == 0
    assert fake_daemon.requests[-1] == Stop()
    assert json.loads(capsys.readouterr().out) == {
        "message": "Stopped the daemon and its sessions.",
        "checkpoints": ["digits-auto"],
        "problems": ["maths.ipynb: it was busy for 30 s."],
    }


def test_restore_last_finds_the_last_checkpoint(
    fake_daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["restore", "--last", SESSION["id"]]) == 0
    assert fake_daemon.requests[-2:] == [
        LastCheckpoint(SESSION["id"]),
        Restore(SESSION["id"], "before-lunch"),
    ]
    last: LastCheckpointView = {
        "name": "before-lunch", "created": "", "automatic": True, "earlier": False, "died": False,
    }  # fmt: skip
    fake_daemon.sessions["other"] = SESSION | {"id": "other"}
    assert commands.main(["restore", "--last"]) == 1
    assert "No session has a checkpoint" in capsys.readouterr().err
    fake_daemon.sessions["other"]["last_checkpoint"] = last
    assert commands.main(["restore", "--last"]) == 0
    assert fake_daemon.requests[-1] == Restore("other", "before-lunch")
    fake_daemon.sessions[SESSION["id"]]["last_checkpoint"] = last
    assert commands.main(["restore", "--last"]) == 1
    assert "Choose one: 0123abcd (digits.ipynb), other (digits.ipynb)." in (capsys.readouterr().err)
    with pytest.raises(SystemExit):
        commands.main(["restore"])


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    file = tmp_path / "lab.yaml"
    file.write_text("virtual_clusters: {lab: {users: [{name: ada, weight: 2}]}}")
    return file


def test_policy_apply_shows_affected_users_before_confirmation(
    fake_daemon: FakeDaemon, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = f"{AFFECTED['text']}\n{NOTES[0]}\n"
    assert commands.main(["policy", "apply", "--dry-run", str(policy)]) == 0
    assert capsys.readouterr().out == f"{said}Nothing was applied.\n"
    assert fake_daemon.requests == [SetPolicy(policy.read_text(), dry=True)]
    assert commands.main(["policy", "apply", str(policy)]) == 0
    assert capsys.readouterr().out == f"{said}{policy} is applied.\n"
    dry, applied = fake_daemon.requests[1:]
    assert (dry, applied) == (
        SetPolicy(policy.read_text(), dry=True),
        SetPolicy(policy.read_text()),
    )
    assert commands.main(["policy", "show", "--json"]) == 0
    assert '"weight": 2' in capsys.readouterr().out
    assert commands.main(["policy", "apply", str(policy)]) == 0  # again
    assert capsys.readouterr().out == f"{NOTES[0]}\nNothing changes. {policy} is applied.\n"


def test_policy_apply_reports_affected_users_as_json(
    fake_daemon: FakeDaemon, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, message in (
        (["--dry-run"], "Nothing was applied."),
        ([], f"{policy} is applied."),
    ):
        assert commands.main(["policy", "apply", "--json", *options, str(policy)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found == {"message": message, "affected": [AFFECTED], "notes": NOTES}


def test_policy_apply_does_not_send_an_invalid_policy(
    fake_daemon: FakeDaemon, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy.write_text("defaults: {wieght: 2}")
    assert commands.main(["policy", "apply", str(policy)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"jupyter sing: {policy}: defaults.wieght: is no key here")
    assert fake_daemon.requests == []


def test_stop_without_a_daemon_succeeds(
    runtime_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["stop"]) == 0
    assert capsys.readouterr().out == "The daemon was not running.\n"


def test_doctor_reports_missing_parts(
    runtime_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:1GiB@3")
    monkeypatch.setenv("JUPYTER_SING_CRIU", "no-such-criu")
    commands.main(["doctor", "--json"])
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert found["compiler"]["state"] == "missing"
    assert found["device"]["text"].endswith("1.0 GiB")
    assert found["processes"]["state"] == "missing"
    assert "names no-such-criu, which is no program" in found["processes"]["text"]
    assert found["daemon"]["text"].startswith("not running")
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "abacus")
    assert commands.main(["doctor"]) == 1
    assert "'abacus' is not a device" in capsys.readouterr().out


def test_run_passes_arguments_and_exit_status_and_closes_its_session(
    fake_daemon: FakeDaemon, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    script = tmp_path / "program.py"
    script.write_text(
        "import json, os, sys\n"
        "facts = [sys.argv, __name__, sys.path[0], os.environ['SING_SESSION'],\n"
        "         os.environ.get('PYTHONPATH', '')]\n"
        f"open({str(out)!r}, 'w').write(json.dumps(facts))\n"
        "sys.exit(7)\n"
    )
    pytest.importorskip("torch")
    assert commands.main(["run", "--name", "mine", str(script), "a", "--json", "-b"]) == 7
    argv, name, path0, session, python_path = json.loads(out.read_text())
    assert argv == [str(script), "a", "--json", "-b"]
    assert (name, path0) == ("__main__", str(tmp_path))
    assert session == "s1"
    for_children, *others = python_path.split(os.pathsep)
    assert for_children.endswith("/kernelproxy/kernel/activation/children")
    assert not any("bundle" in each for each in others)  # our packages are hidden from children
    assert fake_daemon.requests[-1] == CloseSession("s1")


def test_run_reports_a_program_killed_by_a_signal(
    fake_daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTERHUB_USER", "ada")
    script = tmp_path / "program.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert commands.main(["run", "--python", sys.executable, str(script)]) == 137
    opened = next(each for each in fake_daemon.requests if isinstance(each, OpenSession))
    assert opened.user == "ada"


def test_run_without_permission_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It does not run at all: on the CPU it would be a different program."""

    def refuse(*_: object) -> str:
        raise ControlError("The policy does not let eve use devices.", "not-allowed")

    script = tmp_path / "train.py"
    script.write_text("print('runs')")
    monkeypatch.setattr(program, "_open_session", refuse)
    assert commands.main(["run", str(script)]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "The policy does not let eve use devices." in err


def test_run_of_a_missing_program_is_an_error(
    runtime_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["run", "nowhere.py"]) == 1
    assert capsys.readouterr().err == "jupyter sing: The program nowhere.py was not found.\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["simulate", "--workload", "{}/none.csv", "--gpus", "1"], "No such file or directory."),
        (["simulate", "--workload", "{}", "--gpus", "1"], "Is a directory."),
        (["simulate", "--workload", "generator", "--policy", "{}/none", "--gpus", "1"], "No such"),
        (["policy", "check", "{}/none.yaml"], "No such file or directory."),
    ],
)
def test_unreadable_file_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main([each.format(tmp_path) for each in arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"jupyter sing: {tmp_path}")
    assert said in line
    assert "Errno" not in line


@pytest.mark.parametrize("lines", [1, 100_000])
def test_closed_output_pipe_ends_a_verb_quietly(lines: int) -> None:
    program = (
        "import sys\n"
        "from jupyter_sing.cli import commands as cli, doctor\n"
        "from jupyter_sing.cli.doctor import Finding\n"
        f"doctor.examine = lambda python: [Finding('ok', 'x', 'y' * 50)] * {lines}\n"
        "sys.stdin.read(1)\n"  # until its output is no longer read
        "sys.exit(cli.main(['doctor']))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.parametrize("arguments", [["--help"], ["status"], ["status", "--json"], ["why", "x"]])
@pytest.mark.parametrize("errors", [False, True])
def test_closed_output_pipe_is_not_a_failure(
    runtime_dir: Path, arguments: list[str], errors: bool
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "jupyter_sing.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=writer if errors else subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writer)
    is_refused = arguments[0] == "why"
    assert done.returncode == int(is_refused)
    assert errors or len(done.stderr.splitlines()) == int(is_refused)
