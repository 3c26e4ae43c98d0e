"""The kernel's IPython extension: cells are counted exactly, `%sing` says one line."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from jupyter_sing import lost_sessions
from jupyter_sing.notebook import magics
from jupyter_sing.notebook import status_text as table
from kernelproxy.common.protocol import KernelRequest
from kernelproxy.common.protocol.views import CheckpointView
from kernelproxy.kernel import activation, checkpoint_client, ipython_extension
from tests.unit.fake_daemon import CHECKPOINT, SESSION, FakeDaemon

ROOT = Path(__file__).parents[3]


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> activation.Activation:
    """The state of a process that is the kernel of a session."""
    state = activation.Activation(session=SESSION["id"])
    monkeypatch.setattr(activation.state, "_current", state)
    return state


@pytest.fixture
def shell(state: activation.Activation) -> Iterator[InteractiveShell]:
    """An IPython shell whose cells are counted."""
    shell = InteractiveShell()
    counter = ipython_extension.CellCounter()
    shell.events.register("pre_run_cell", counter.pre_run_cell)
    shell.events.register("post_run_cell", counter.post_run_cell)
    shell.user_ns["state"] = state
    yield shell
    assert shell.history_manager is not None
    shell.history_manager.end_session()
    InteractiveShell.clear_instance()


@pytest.mark.parametrize(
    "cell", ["pass", "1 / 0", "def broken(:", "raise KeyboardInterrupt", "", "  \n", "exit()"]
)
def test_no_cell_is_running_afterwards(
    shell: InteractiveShell, state: activation.Activation, cell: str
) -> None:
    shell.run_cell(cell)
    assert state.cells == 0


def test_a_cell_runs_while_it_runs(shell: InteractiveShell, state: activation.Activation) -> None:
    shell.user_ns["shell"] = shell
    shell.run_cell(
        "seen = [state.cells]\n"
        "shell.run_cell('inner = state.cells')\n"
        "shell.run_cell('')\n"
        "seen += [inner, state.cells]"
    )
    assert shell.user_ns["seen"] == [1, 2, 1]
    assert state.cells == 0


def test_cells_of_subshells_are_counted_for_themselves(state: activation.Activation) -> None:
    class CellInfo:
        raw_cell = "same text"

    class CellResult:
        info = CellInfo

    counter = ipython_extension.CellCounter()
    counter.pre_run_cell(CellInfo)
    other = threading.Thread(target=counter.post_run_cell, args=(CellResult,))
    other.start()
    other.join()
    assert state.cells == 1  # the other thread has started no cell
    counter.post_run_cell(CellResult)
    assert state.cells == 0


def test_a_client_that_joins_in_mid_cell_is_notified_of_it(state: activation.Activation) -> None:
    class Client:
        received: list[int] = []  # noqa: RUF012

        def cell(self, change: int) -> None:
            self.received.append(change)

    activation.cell(1)
    client: Any = Client()
    activation.state.joined(client)
    activation.cell(-1)
    assert client.received == [1, -1]


def test_cells_are_reported_over_the_link_until_the_client_has_joined(
    state: activation.Activation,
) -> None:
    class Listening:
        said: list[int] = []  # noqa: RUF012
        ended = False

        def report_cells(self, ended: int) -> None:
            self.said.append(ended)

        def end(self) -> None:
            self.ended = True

    class Client:
        received: list[int] = []  # noqa: RUF012

        def cell(self, change: int) -> None:
            self.received.append(change)

    link: Any = Listening()
    client: Any = Client()
    activation.cell(1)
    activation.cell(-1)  # before it listens
    state.listening = link
    activation.cell(1)
    activation.cell(-1)
    activation.cell(1)
    activation.state.joined(client)
    activation.cell(-1)
    assert (link.said, link.ended) == ([2], True)
    assert client.received == [1, -1]
    assert state.listening is None


def test_a_request_that_is_withdrawn_is_not_carried_out(
    state: activation.Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    callbacks: list[Any] = []
    carried: list[str] = []
    loop = SimpleNamespace(add_callback=callbacks.append)
    shell = SimpleNamespace(kernel=SimpleNamespace(io_loop=loop))
    monkeypatch.setattr(
        checkpoint_client, "carry_out", lambda request, *_: carried.append(request.name)
    )
    requests, state.cells = ipython_extension.KernelRequests(shell), 1
    for name in ("one", "two"):
        requests(KernelRequest("restore", name))
    requests(KernelRequest("restore", "one", withdrawn=True))
    requests(KernelRequest("restore", "three", withdrawn=True))
    state.cells = 0
    for each in callbacks:
        each()
    assert carried == ["two"]


def test_a_cell_requested_during_another_is_reported(
    state: activation.Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[int] = []
    taken: list[Any] = []
    monkeypatch.setattr(activation, "cell_asked", lambda: reports.append(1))

    async def take(message: Any) -> None:
        taken.append(message)

    kernel = SimpleNamespace(shell_channel_thread_main=take)
    ipython_extension.receive_requests(kernel)
    ipython_extension.receive_requests(SimpleNamespace())  # of ipykernel 6
    ask = [b"id", b"<IDS|MSG>", b"hmac", b'{"msg_type": "execute_request"}', b"{}"]
    other = [*ask[:3], b'{"msg_type": "complete_request"}', b"{}"]
    for cells, message in ((0, ask), (1, other), (1, [b"x"]), (1, ask)):
        state.cells = cells
        asyncio.run(kernel.shell_channel_thread_main(message))
        assert taken[-1] is message
        assert reports == ([1] if message is ask and cells else [])


def test_modules_of_a_request_are_imported_in_advance() -> None:
    program = (
        "import sys\n"
        "import numpy\n"
        "from kernelproxy.kernel.ipython_extension import KernelRequests\n"
        "from kernelproxy.common.protocol import KernelRequest\n"
        "class Shell:\n"
        "    class kernel:\n"
        "        class io_loop:\n"
        "            def add_callback(*_): seen.append(set(sys.modules))\n"
        "seen = []\n"
        "KernelRequests(Shell)(KernelRequest('checkpoint', 'one'))\n"
        "from kernelproxy.kernel.checkpoint_client import capture_notebook, gather\n"
        "from kernelproxy.kernel.namespace import capture\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "cell = 'import numpy as np; a = np.ones(3); b = np.zeros((2, 2)).view(np.matrix)'\n"
        "shell.run_cell(cell)\n"
        "seen.append(set(sys.modules))\n"
        "assert [each.name for each in capture_notebook(shell).saved] == ['np', 'a', 'b']\n"
        "gather()\n"
        "print(*set(sys.modules) - seen[1])\n"
        "print('kernelproxy.kernel.checkpoint_client' in seen[0], 'cloudpickle' in seen[0])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(
        [sys.executable, "-c", program],
        check=True, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert said.stdout.splitlines() == ["", "True True"]


def test_the_last_checkpoint_and_what_failed_are_a_line_each(
    fake_daemon: FakeDaemon, state: activation.Activation, capsys: pytest.CaptureFixture[str]
) -> None:
    session = fake_daemon.sessions[SESSION["id"]]
    name, created = "auto-1", "2026-01-01T12:00:00+00:00"
    when = table.checkpoints_table([CHECKPOINT]).rows[0][1]
    for earlier, died, text in (
        (False, False, "Last checkpoint: auto-1"),
        (True, False, "From an earlier kernel. Run %sing restore to restore auto-1"),
        (True, True, "The last kernel died. Run %sing restore to restore auto-1"),
    ):
        session["last_checkpoint"] = {
            "name": name, "created": created, "automatic": True, "earlier": earlier, "died": died,
        }  # fmt: skip
        magics.sing("")
        assert capsys.readouterr().out == f"Idle. [3.0 MiB on Simulated GPU 0]\n{text} ({when})\n"
    session["last_checkpoint"] = None
    session["automatic"] = {**SESSION["automatic"], "problem": "The disk is full."}
    magics.sing("")
    assert capsys.readouterr().out.split("\n")[1] == "No automatic checkpoint: The disk is full."


def test_checkpoints_are_listed_when_the_daemon_has_ended(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def stored() -> list[CheckpointView]:
        return [CHECKPOINT]

    async def run_cell() -> Any:  # in its loop, as in a kernel
        return magics.sing("checkpoints")

    monkeypatch.setenv("SING_SOCKET", str(runtime_dir / "agent.sock"))
    assert asyncio.run(run_cell()) is None
    assert capsys.readouterr() == ("0 checkpoints\n", "")
    monkeypatch.setattr(lost_sessions, "stored", stored)
    assert asyncio.run(run_cell()).rows == table.checkpoints_table([CHECKPOINT]).rows
    assert capsys.readouterr().out == (
        "1 checkpoint\n"
        "The GPU session of this kernel has ended: restart the kernel, then %sing restore.\n"
    )


def test_checkpoints_by_themselves_are_set_and_shown(
    fake_daemon: FakeDaemon, state: activation.Activation, capsys: pytest.CaptureFixture[str]
) -> None:
    for line, text in (
        ("auto", "off"),
        ("auto 10m", "every 10 min; keeps the last 3"),
        ("auto", "every 10 min; keeps the last 3"),
        ("auto 20 cells", "every 20 cells; keeps the last 3"),
        ("auto off", "off"),
    ):
        assert magics.sing(line) is None
        assert capsys.readouterr().out == f"Automatic checkpoints: {text}\n"
    assert magics.sing("auto often") is None
    assert capsys.readouterr().err == (
        "jupyter_sing: %sing auto often is not an interval: write 90s, 10m, 2h, 20 cells or off.\n"
    )


def test_status_is_one_line_and_a_table(
    fake_daemon: FakeDaemon, state: activation.Activation, capsys: pytest.CaptureFixture[str]
) -> None:
    table = magics.sing("")
    assert capsys.readouterr().out == "Idle. [3.0 MiB on Simulated GPU 0]\n"
    assert "digits.ipynb" in str(table)
    assert "<table>" in table._repr_html_()


def test_suspend_and_resume(
    fake_daemon: FakeDaemon, state: activation.Activation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert magics.sing("suspend") is None
    assert capsys.readouterr().out == "Suspended by %sing suspend. Resumes when you run a cell.\n"
    assert magics.sing("resume") is None
    assert capsys.readouterr().out == "Resumed on Simulated GPU 0. Idle.\n"


def test_migrate_reports_its_cost(
    fake_daemon: FakeDaemon, state: activation.Activation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert magics.sing("migrate cpu:1") is None
    said = "Now on Simulated GPU 1. Moved in 0.5 s, paused for 0.020 s.\n"
    assert capsys.readouterr().out == said


def test_pins_and_priorities(
    fake_daemon: FakeDaemon, state: activation.Activation, capsys: pytest.CaptureFixture[str]
) -> None:
    for line, said in (
        ("pin", "Pinned: its memory stays on Simulated GPU 0."),
        ("unpin", "Not pinned: its memory may leave the GPU when other sessions need it."),
        ("priority", "Priority: default"),
        ("priority basic", "Priority: basic"),
        ("priority", "Priority: basic"),
    ):
        assert magics.sing(line) is None
        assert capsys.readouterr() == (f"{said}\n", "")
    for line, error in (
        ("priority premium", "Premium is for others."),
        ("priority best", "There is no priority 'best'."),
        ("pin now", "%sing pin has wrong arguments. Run %sing help to see the right ones."),
    ):
        assert magics.sing(line) is None
        assert capsys.readouterr() == ("", f"jupyter_sing: {error}\n")


@pytest.mark.parametrize("line", ["dance", "suspend now", "migrate", "migrate cpu:9", "status"])
def test_errors_are_one_line(
    line: str,
    runtime_dir: Path,
    state: activation.Activation,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert magics.sing(line) is None
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("jupyter_sing: ")
    assert printed.err.count("\n") == 1


def test_without_a_session_the_reason_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(activation.state, "_current", activation.Activation())
    monkeypatch.setenv("SING_REASON", "torch 2.5.0 is not supported")
    assert magics.sing("suspend") is None
    assert capsys.readouterr().out == "CPU only: torch 2.5.0 is not supported\n"


def test_an_extension_that_is_not_there_is_named_and_others_are_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SING_SESSION", raising=False)
    monkeypatch.setenv("SING_EXTENSIONS", "jupyter_sing.nowhere,jupyter_sing.notebook.magics")
    shell = InteractiveShell()
    ipython_extension.load_ipython_extension(shell)
    assert shell.find_line_magic("sing") is not None
    said = capsys.readouterr().err
    assert said.startswith("jupyter_sing: jupyter_sing.nowhere is not available: ")
    assert said.count("\n") == 1


def test_html_is_escaped(state: activation.Activation) -> None:
    from jupyter_sing.notebook.status_text import sessions_table

    html = sessions_table([SESSION | {"name": "<script>"}])._repr_html_()
    assert "&lt;script&gt;" in html
    assert "<script>" not in html
