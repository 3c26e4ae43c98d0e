"""Kernels get a session if possible, and otherwise start as they would have without us."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_events import EventLogger

from jupyter_sing.server.extension import EVENT_SCHEMA
from kernelproxy.common import paths
from kernelproxy.common.errors import NativeError
from kernelproxy.common.protocol import CloseSession, LastCheckpoint, OpenSession, Prepare, Tend
from kernelproxy.criu import sandbox
from kernelproxy.kernel.files import tracker
from kernelproxy.native import build, tools
from kernelproxy.provisioning import provisioner
from kernelproxy.provisioning.events import EVENT_ID
from tests.unit.fake_daemon import FakeDaemon

IPYKERNEL = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
TRACKER = Path("/cache/fstrack-0/libsing_fstrack.so")
INFO = build.TorchInfo("2.13.0", Path("torch"), "cpython-311", "x86_64", Path("include"))
FORM = {"kind": "root", "criu": "/usr/sbin/criu"}
# Prints how it was started as a kernel, and whether it could listen where clients connect.
SHOW = """
import json, os, socket, sys
file = next(each for each in sys.argv if each.endswith(".json"))
info = json.load(open(file))
ports = [info[name + "_port"] for name in ("shell", "iopub", "stdin", "hb", "control")]
sock = socket.socket()
sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
sock.bind((info["ip"], ports[0]))
reason, mode = os.environ.get("SING_PROCESS_REASON"), oct(os.stat(file).st_mode & 0o777)
shown = {"file": file, "reason": reason, "mode": mode, "ports": ports, "free": True}
print(json.dumps({**{name: str(each) for name, each in shown.items()}, "key": info["key"]}))
"""


def no_sandbox(report: int) -> list[str]:
    """A program that reports like a sandbox, but is none."""
    program = (
        "import os, sys\n"
        f"os.write({report}, b'%d\\n' % os.getpid())\n"
        f"os.close({report})\n"
        "os.execvp(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-c", program]


Make = Callable[..., provisioner.SingProvisioner]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make a provisioner as the factory does, for a kernel specification."""
    monkeypatch.setattr(build, "find_torch", lambda python, env=None: INFO)
    monkeypatch.setattr(provisioner, "_torch_of", {})
    monkeypatch.setattr(provisioner, "_trackable", set())
    monkeypatch.setattr(tools, "file_tracker", lambda say: TRACKER)
    monkeypatch.setattr(tracker, "check", lambda python, library, env: None)
    made: list[provisioner.SingProvisioner] = []

    def make(argv: list[str] = IPYKERNEL, language: str = "python") -> provisioner.SingProvisioner:
        spec = KernelSpec(argv=argv, language=language)
        manager = AsyncKernelManager(kernel_id=str(uuid.uuid4()))
        manager._kernel_spec = spec
        one = provisioner.SingProvisioner(
            kernel_id=manager.kernel_id, kernel_spec=spec, parent=manager
        )
        made.append(one)
        return one

    yield make
    for one in made:
        asyncio.run(one.cleanup())
        assert one.parent is not None
        one.parent.cleanup_connection_file()


def launch(one: provisioner.SingProvisioner, **env: str) -> tuple[list[str], dict[str, str]]:
    kwargs = asyncio.run(one.pre_launch(env={"PATH": os.environ["PATH"], **env}))
    return kwargs["cmd"], kwargs["env"]


def test_the_entry_point_names_it() -> None:
    factory = KernelProvisionerFactory.instance()
    if "sing" not in factory.provisioners:
        pytest.skip("jupyter_sing is not installed here")
    assert factory.provisioners["sing"].load() is provisioner.SingProvisioner


def test_a_python_kernel_gets_a_session(fake_daemon: FakeDaemon, make: Make) -> None:
    one = make()
    command, env = launch(
        one, JPY_SESSION_NAME="/home/ada/digits.ipynb", PYTHONPATH="/theirs", SING_REASON="old"
    )
    assert command[-1] == "--ext=kernelproxy.kernel.ipython_extension"
    assert command[:4] == [sys.executable, "-m", "ipykernel_launcher", "-f"]
    assert env["SING_SESSION"] == one.session == "s1"
    assert env["SING_SOCKET"] == str(paths.socket_path())
    assert env["PYTHONPATH"].split(os.pathsep) == [str(paths.bundle_dir()), "/theirs"]
    assert env["SING_EXTENSIONS"] == "jupyter_sing.notebook.magics"
    assert "SING_REASON" not in env
    opened, prepared = fake_daemon.requests
    assert isinstance(opened, OpenSession)
    assert (opened.name, opened.kernel_id) == ("digits.ipynb", one.kernel_id)
    assert (opened.idle_timeout, opened.user) == (None, "")  # no settings
    assert prepared == Prepare(sys.executable)


def test_a_restart_replaces_the_session(fake_daemon: FakeDaemon, make: Make) -> None:
    one = make()
    launch(one)
    asyncio.run(one.cleanup(restart=True))
    assert fake_daemon.requests[-1] == CloseSession("s1")
    _, env = launch(one)
    assert env["SING_SESSION"] == "s1"  # the fake counts its sessions: the first was removed
    kinds = [type(request) for request in fake_daemon.requests]
    assert kinds == [OpenSession, Prepare, CloseSession, OpenSession, Prepare]


def test_the_end_of_the_kernel_closes_its_session_once(fake_daemon: FakeDaemon, make: Make) -> None:
    one = make()
    launch(one)
    asyncio.run(one.cleanup())
    asyncio.run(one.cleanup())
    assert [r for r in fake_daemon.requests if isinstance(r, CloseSession)] == [CloseSession("s1")]


class ProvisionedProcess:
    """A kernel's process, with what the provisioner uses of it."""

    pid = 1

    def __init__(self, status: int | None) -> None:
        self.status = status

    def poll(self) -> int | None:
        return self.status

    def send_signal(self, number: int) -> None:
        if self.status is None:
            self.status = -number


@pytest.mark.parametrize("end", ["crash", "exit", "asked", "killed", "terminated"])
def test_a_death_is_distinguished_from_an_end_that_was_wanted(
    fake_daemon: FakeDaemon, make: Make, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = make()
    launch(one)
    process: Any = ProvisionedProcess({"crash": -11, "exit": 0}.get(end))
    one.process, one.pid, one.pgid = process, process.pid, None

    async def end_it() -> None:
        """Do what the kernel manager does, after a crash or at a restart."""
        if end == "asked":
            await one.shutdown_requested(restart=True)
            process.status = 1
        elif end == "terminated":
            await one.terminate(restart=True)
        else:
            await one.kill(restart=True)
        await one.poll()
        await one.cleanup(restart=True)

    asyncio.run(end_it())
    one.process = None
    assert fake_daemon.requests[-1] == CloseSession("s1", died=end == "crash")
    launch(one)
    asked = [each for each in fake_daemon.requests if isinstance(each, LastCheckpoint)]
    assert asked == ([LastCheckpoint("s1", one.kernel_id or "")] if end == "crash" else [])
    offered = f"kernel {one.kernel_id} died: %sing restore before-lunch restores its last"
    assert (offered in caplog.text) is (end == "crash")
    asyncio.run(one.cleanup())
    assert fake_daemon.requests[-1] == CloseSession("s1")  # closed once


@pytest.mark.parametrize("known", [True, False])
def test_a_death_is_an_event_that_names_the_command(
    fake_daemon: FakeDaemon, make: Make, known: bool
) -> None:
    one = make()
    events: list[dict[str, Any]] = []
    logger = EventLogger()

    async def listen(logger: Any, schema_id: str, data: dict[str, Any]) -> None:
        events.append(data)

    if known:
        logger.register_event_schema(EVENT_SCHEMA)
        logger.add_listener(schema_id=EVENT_ID, listener=listen)
    manager: Any = one.parent
    manager.event_logger = logger  # like the kernels of a server
    launch(one, JPY_SESSION_NAME="/home/ada/digits.ipynb")
    process: Any = ProvisionedProcess(-9)
    one.process, one.pid, one.pgid = process, process.pid, None

    async def look() -> None:
        for _ in range(3):
            assert await one.poll() == -9
        await logger.gather_listeners()

    asyncio.run(look())
    request = LastCheckpoint("s1", one.kernel_id or "", "/home/ada/digits.ipynb")
    assert fake_daemon.requests.count(request) == 1
    one.process = None
    if not known:  # the extension is off
        assert events == []
        return
    (event,) = events
    assert (event["session"], event["kernel_id"]) == ("s1", one.kernel_id)
    assert (event["checkpoint"], event["command"]) == ("before-lunch", "%sing restore before-lunch")


def test_a_death_while_there_is_no_daemon_is_reported_at_the_next_start(
    make: Make, runtime_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = make()
    first = FakeDaemon(runtime_dir / "agent.sock")
    launch(one)
    first.close()
    (runtime_dir / "agent.sock").unlink()
    process: Any = ProvisionedProcess(-9)
    one.process, one.pid, one.pgid = process, process.pid, None
    assert asyncio.run(one.poll()) == -9
    assert "died" not in caplog.text
    one.process = None
    second = FakeDaemon(runtime_dir / "agent.sock")
    try:
        launch(one)
        assert LastCheckpoint(one.session) in second.requests
        assert f"kernel {one.kernel_id} died: %sing restore before-lunch" in caplog.text
        asyncio.run(one.cleanup())
    finally:
        second.close()


def test_a_session_has_its_notebook_and_when_to_be_saved(
    fake_daemon: FakeDaemon, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_SING_CHECKPOINT_EVERY", "600")
    monkeypatch.setenv("JUPYTER_SING_CHECKPOINT_CELLS", "20")
    monkeypatch.setenv("JUPYTER_SING_CHECKPOINT_KEEP", "many")
    launch(make(), JPY_SESSION_NAME="/home/ada/digits.ipynb")
    launch(make(), JPY_SESSION_NAME="digits.ipynb")
    first, second = (each for each in fake_daemon.requests if isinstance(each, OpenSession))
    assert (first.checkpoint_every, first.checkpoint_cells, first.checkpoint_keep) == (600, 20, 3)
    assert first.notebook == "/home/ada/digits.ipynb"
    assert second.notebook == ""  # a name alone may be that of several


@pytest.mark.parametrize(
    ("argv", "language"),
    [
        (["julia", "-m", "ipykernel_launcher", "{connection_file}"], "julia"),
        ([sys.executable, "-m", "xeus_python", "-f", "{connection_file}"], "python"),
        ([sys.executable, "kernel.py", "-m", "ipykernel_launcher"], "python"),
        (["conda", "run", "python", "-m", "ipykernel_launcher", "-f", "x"], "python"),
        (["no-such-python3", "-m", "ipykernel_launcher", "-f", "x"], "python"),
    ],
)
def test_other_kernels_are_left_alone(
    fake_daemon: FakeDaemon, make: Make, argv: list[str], language: str
) -> None:
    command, env = launch(make(argv, language), PYTHONPATH="/theirs")
    assert "--ext=kernelproxy.kernel.ipython_extension" not in command
    assert {k: v for k, v in env.items() if k != "PATH"} == {"PYTHONPATH": "/theirs"}
    assert fake_daemon.requests == []


@pytest.mark.parametrize("options", [["-Xfrozen_modules=off"], ["-X", "frozen_modules=off"], []])
def test_interpreter_options_are_understood(options: list[str]) -> None:
    command = [sys.executable, *options, "-m", "ipykernel_launcher", "-f", "x"]
    assert provisioner.ipykernel_interpreter("python", command, {}) == sys.executable


def test_a_kernel_without_torch_is_left_alone(
    fake_daemon: FakeDaemon,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def find_torch(python: str, env: Any = None) -> build.TorchInfo:
        raise NativeError(f"{python} has no torch")

    monkeypatch.setattr(build, "find_torch", find_torch)
    command, env = launch(make())
    assert command == [*IPYKERNEL[:4], command[4]]
    assert "PYTHONPATH" not in env
    assert fake_daemon.requests == []
    assert sum("CPU only" in record.message for record in caplog.records) == 1


def test_an_unsupported_torch_is_explained_in_the_kernel(
    fake_daemon: FakeDaemon, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = build.TorchInfo("1.13.0", Path("torch"), "cpython-311", "x86_64", Path("include"))
    monkeypatch.setattr(build, "find_torch", lambda python, env=None: old)
    command, env = launch(make())
    assert command[-1] == "--ext=kernelproxy.kernel.ipython_extension"
    assert "SING_SESSION" not in env
    assert "1.13.0 is not supported" in env["SING_REASON"]
    assert fake_daemon.requests == []


def test_without_a_daemon_the_kernel_starts_and_receives_the_reason(
    runtime_dir: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SING_SOCKET", str(runtime_dir / "nobody.sock"))
    command, env = launch(make())
    assert command[-1] == "--ext=kernelproxy.kernel.ipython_extension"
    assert "SING_SESSION" not in env
    assert "has ended" in env["SING_REASON"]


def test_our_bugs_leave_the_kernel_alone(
    fake_daemon: FakeDaemon,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(paths, "bundle_dir", lambda: 1 / 0)
    command, env = launch(make())
    assert command[-1] != "--ext=kernelproxy.kernel.ipython_extension"
    assert not any(name.startswith("SING_") for name in env)
    assert "internal error: ZeroDivisionError" in caplog.text


def test_idle_timeout_comes_from_the_environment(
    fake_daemon: FakeDaemon, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_SING_IDLE_TIMEOUT", "12.5")
    launch(make())
    assert isinstance(fake_daemon.requests[0], OpenSession)
    assert fake_daemon.requests[0].idle_timeout == 12.5
    monkeypatch.setenv("JUPYTER_SING_IDLE_TIMEOUT", "soon")
    assert make().idle_timeout is None


@pytest.mark.parametrize(
    ("variables", "user"),
    [
        ({"JUPYTER_SING_USER": "ada", "JUPYTERHUB_USER": "grace"}, "ada"),
        ({"JUPYTER_SING_USER": "", "JUPYTERHUB_USER": "grace"}, "grace"),
    ],
)
def test_a_session_is_for_the_user_named_in_the_environment(
    variables: dict[str, str],
    user: str,
    fake_daemon: FakeDaemon,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    launch(make())
    assert isinstance(fake_daemon.requests[0], OpenSession)
    assert fake_daemon.requests[0].user == user


def test_hibernation_is_off_unless_it_is_requested(
    fake_daemon: FakeDaemon, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(make())
    monkeypatch.setenv("JUPYTER_SING_HIBERNATE_TIMEOUT", "3600")
    launch(make())
    opened = [each for each in fake_daemon.requests if isinstance(each, OpenSession)]
    assert [each.hibernate_timeout for each in opened] == [0.0, 3600.0]


def test_a_kernel_receives_the_reason_why_its_process_cannot_be_saved(
    fake_daemon: FakeDaemon, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, env = launch(make(), SING_PROCESS_REASON="old")
    assert env["SING_PROCESS_REASON"] == "CRIU is not installed"
    fake_daemon.form = (FORM, "")
    _, env = launch(make(), SING_PROCESS_REASON="old")
    assert "SING_PROCESS_REASON" not in env
    monkeypatch.setenv("JUPYTER_SING_SAVE_PROCESS", "no")
    _, env = launch(make())
    assert env["SING_PROCESS_REASON"] == "save_process is off"


def started(one: provisioner.SingProvisioner) -> dict[str, str]:
    """Start a program in place of a kernel, and return how it was started."""

    async def start() -> tuple[bytes, int | None]:
        kwargs = await one.pre_launch(env={"PATH": os.environ["PATH"]})
        kwargs["cmd"] = [sys.executable, "-c", SHOW, *kwargs["cmd"]]
        await one.launch_kernel(**kwargs, stdout=subprocess.PIPE)
        assert one.process is not None
        stdout = one.process.stdout
        assert stdout is not None
        said = stdout.read()
        stdout.close()
        return said, await one.wait()

    said, code = asyncio.run(start())
    assert code == 0
    assert not one.has_process
    found: dict[str, str] = json.loads(said)
    return found


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [
        (["/bin/false"], "the sandbox ended before a process ran in it"),
        (["/nonexistent"], "[Errno 2] No such file or directory: '/nonexistent'"),
    ],
)
def test_a_kernel_that_cannot_be_put_into_a_sandbox_starts_without(
    fake_daemon: FakeDaemon,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    prefix: list[str],
    reason: str,
) -> None:
    fake_daemon.form = (FORM, "")
    monkeypatch.setattr(sandbox, "prefix", lambda form, report, lifeline: prefix)
    one = make()
    shown = started(one)
    assert one.parent is not None
    assert shown["file"] == os.path.realpath(one.parent.connection_file)
    assert shown["reason"] == reason
    assert shown["free"] == "True"
    assert f"cannot be saved: {reason}" in caplog.text
    assert [r for r in fake_daemon.requests if isinstance(r, Tend)] == []


def test_a_kernel_in_a_sandbox_has_ports_of_its_own(
    fake_daemon: FakeDaemon, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_daemon.form = (FORM, "")
    monkeypatch.setattr(sandbox, "prefix", lambda form, report, lifeline: no_sandbox(report))
    one = make()
    shown = started(one)
    assert one.parent is not None
    official = os.path.realpath(one.parent.connection_file)
    assert shown["file"] != official
    assert os.path.basename(shown["file"]) == os.path.basename(official)
    assert (shown["reason"], shown["mode"]) == ("None", "0o600")
    assert shown["ports"] != str(one.parent.ports)
    assert shown["key"] == one.parent.session.key.decode()
    asyncio.run(one.cleanup())
    assert not Path(shown["file"]).exists()
    assert [type(r) for r in fake_daemon.requests].count(Tend) == 1


def test_encrypted_kernels_are_not_put_behind_a_proxy(fake_daemon: FakeDaemon, make: Make) -> None:
    fake_daemon.form = (FORM, "")
    one = make()
    one.kernel_spec.metadata["supported_encryption"] = "curve"
    assert one.parent is not None
    one.parent.transport_encryption = "required"
    assert "encrypted" in started(one)["reason"]


def test_files_are_tracked_across_restarts_until_the_kernel_ends(
    fake_daemon: FakeDaemon, make: Make
) -> None:
    one = make()
    _, env = launch(one, LD_PRELOAD="/theirs.so")
    journal = paths.journal_path(one.kernel_id)
    assert env["SING_FSTRACK"] == str(journal)
    assert env["LD_PRELOAD"] == f"{TRACKER}:/theirs.so"
    assert (journal.stat().st_mode & 0o777, journal.read_bytes()) == (0o600, b"")
    assert journal.parent.stat().st_mode & 0o777 == 0o700
    journal.write_bytes(b"\0/a//")
    asyncio.run(one.cleanup(restart=True))
    launch(one)
    assert journal.read_bytes() == b"\0/a//"
    asyncio.run(one.cleanup())
    assert not journal.exists()
    asyncio.run(one.cleanup())


def test_variables_of_a_surrounding_kernel_are_removed(fake_daemon: FakeDaemon, make: Make) -> None:
    inherited = {
        "LD_PRELOAD": f"{TRACKER.parent.parent}/fstrack-1/libsing_fstrack.so:/theirs.so",
        "SING_FSTRACK": "/outer.files",
    }
    one = make()
    _, env = launch(one, **inherited)
    assert env["LD_PRELOAD"] == f"{TRACKER}:/theirs.so"
    assert env["SING_FSTRACK"] == str(paths.journal_path(one.kernel_id))
    _, env = launch(make([sys.executable, "-m", "xeus_python", "-f", "x"]), **inherited)
    assert "SING_FSTRACK" not in env
    assert env["LD_PRELOAD"] == "/theirs.so"


@pytest.mark.parametrize("setting", ["0", "False", "off", " no "])
def test_tracking_can_be_switched_off(
    fake_daemon: FakeDaemon, make: Make, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setenv("JUPYTER_SING_TRACK_FILES", setting)
    _, env = launch(make())
    assert "SING_SESSION" in env
    assert "SING_FSTRACK" not in env
    assert env["SING_FSTRACK_REASON"] == "track_files is off"
    assert (env["LD_PRELOAD"], env["SING_GPU_FILES"]) == (str(TRACKER), "/dev/nvidia:/dev/dxg")
    monkeypatch.setenv("JUPYTER_SING_DIRECT_GPU", "1")
    _, env = launch(make())
    assert not {"LD_PRELOAD", "SING_FSTRACK"} & env.keys()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NativeError("there is no C++ compiler (g++)."), "there is no C++ compiler (g++)"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (ZeroDivisionError("no"), "internal error: ZeroDivisionError: no"),
    ],
)
def test_a_kernel_whose_files_cannot_be_tracked_is_proxied_all_the_same(
    fake_daemon: FakeDaemon,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    reason: str,
) -> None:
    def check(python: str, library: Path, env: dict[str, str]) -> None:
        raise error

    monkeypatch.setattr(tracker, "check", check)
    command, env = launch(make())
    assert command[-1] == "--ext=kernelproxy.kernel.ipython_extension"
    assert "SING_SESSION" in env
    assert not {"LD_PRELOAD", "SING_FSTRACK"} & env.keys()
    assert env["SING_FSTRACK_REASON"] == reason
    assert f"are not tracked: {reason}" in caplog.text


def test_each_interpreter_is_tried_once(
    fake_daemon: FakeDaemon, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    monkeypatch.setattr(tracker, "check", lambda python, library, env: tried.append(python))
    for _ in range(2):
        launch(make())
    assert tried == [sys.executable]


def test_a_kernel_without_a_session_is_not_tracked(
    runtime_dir: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SING_SOCKET", str(runtime_dir / "nobody.sock"))
    _, env = launch(make())
    assert not {"SING_SESSION", "SING_FSTRACK", "SING_FSTRACK_REASON"} & env.keys()
    # But its torch, which says that it computes on the CPU, must not find a GPU.
    assert (env["LD_PRELOAD"], env["SING_GPU_FILES"]) == (str(TRACKER), "/dev/nvidia:/dev/dxg")


def test_a_kernel_has_the_gpu_itself_only_if_that_is_wanted(
    fake_daemon: FakeDaemon, make: Make
) -> None:
    _, env = launch(make())
    assert env["SING_GPU_FILES"] == "/dev/nvidia:/dev/dxg"
    assert "SING_DIRECT_GPU" not in env
    one = make()
    one.direct_gpu = True
    inherited = {"CUDA_VISIBLE_DEVICES": "-1", "SING_VISIBLE_DEVICES": "2"}
    _, env = launch(one, SING_GPU_FILES="/dev/nvidia", **inherited)
    assert "SING_GPU_FILES" not in env
    assert (env["SING_DIRECT_GPU"], env["CUDA_VISIBLE_DEVICES"]) == ("1", "2")
    assert env["SING_FSTRACK"] == str(paths.journal_path(one.kernel_id))


@pytest.mark.parametrize("kernel_id", ["", "../../x", "a/b", ".", "x" * 300, "caf\udce9"])
def test_any_name_of_a_kernel_gives_a_journal_in_our_directory(
    runtime_dir: Path, kernel_id: str
) -> None:
    journal = paths.journal_path(kernel_id)
    assert journal.parent == runtime_dir / "journals"
    journal.touch()


EXECUTE = ["/opt/bin/jupyter-execute", "--timeout=9", "runs/nightly.ipynb"]


@pytest.mark.parametrize(
    ("notebook", "program", "expected"),
    [
        ("/home/ada/digits.ipynb", EXECUTE, "digits.ipynb"),
        ("", EXECUTE, "nightly.ipynb"),
        ("", ["/opt/bin/papermill", "in.ipynb", "out.ipynb"], "in.ipynb"),
        ("", ["/opt/bin/jupyter-execute", "a.ipynb", "b.ipynb"], "reports"),
        ("", ["run.py", "--notebook"], "reports"),
        ("", [], "reports"),
        ("", ["jupyter-execute", "実験　1.ipynb"], "実験　1.ipynb"),
        ("", ["jupyter-execute", "a\n\x1b[2J\udcff.ipynb"], "a\\n\\x1b[2J\\udcff.ipynb"),
        ("", ["jupyter-execute", 300 * "a" + ".ipynb"], 200 * "a"),
    ],
)
def test_a_kernel_without_a_server_is_called_what_it_runs(
    notebook: str, program: list[str], expected: str
) -> None:
    env = {"JPY_SESSION_NAME": notebook} if notebook else {}
    assert provisioner.session_name(env, program, "/srv/reports", "kernel-0") == expected
    assert provisioner.session_name({}, [], "/", "kernel-0") == "kernel-0"
