"""The widget of a real kernel: the messages that a page receives, and the effects of clicks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from jupyter_sing.notebook import view_model
from kernelproxy.common.errors import ProcessError
from kernelproxy.common.ipc.agent_client import connect
from kernelproxy.common.protocol import CheckpointsReply, CheckpointsRequest, Suspend
from kernelproxy.criu import mode_probe as forms
from tests.e2e.kernels import SECONDS_MAX, sessions, wait_for_session
from tests.e2e.pages import WIDGET, WidgetKernel, page
from tests.e2e.trainers import agent_pid

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SHOW = "from jupyter_sing import widget\nw = widget.status()\nw"
USE = "import torch\nx = torch.ones(1 << 20, device='cuda')\nprint(x.sum().item())"
THREADS = """\
import threading, time
deadline = time.monotonic() + 120
def watching(): return sum(t.name == 'jupyter_sing watch' for t in threading.enumerate())
while watching() > {0} and time.monotonic() < deadline: time.sleep(0.01)
print(watching())
"""


@pytest.fixture(autouse=True)
def _sing(monkeypatch: pytest.MonkeyPatch, runtime_dir: Path, tmp_path: Path) -> None:
    monkeypatch.setenv("JUPYTER_DEFAULT_PROVISIONER_NAME", "sing")
    monkeypatch.setenv("JUPYTER_SING_DEVICES", "cpu:1GiB@1,cpu:1GiB@1")
    monkeypatch.setenv("JUPYTER_SING_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("JUPYTER_SING_SAVE_PROCESS", "0")
    monkeypatch.chdir(tmp_path)


def names() -> list[tuple[str, list[str]]]:
    with connect(start=False) as control:
        found = control.expect(CheckpointsReply, CheckpointsRequest(), SECONDS_MAX).checkpoints
    return [(each["name"], each["forms"]) for each in found]


def suspend_from_outside() -> None:
    (session,) = sessions()
    with connect(start=False) as control:
        control.call(Suspend(session["id"], "Suspended by a test"), SECONDS_MAX)


def test_widget_follows_with_and_without_a_running_cell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JUPYTER_SING_IDLE_TIMEOUT", "1")
    with page() as notebook:
        model = notebook.show(SHOW)
        notebook.wait_for(model, "Not used yet")
        notebook.run(USE)
        notebook.wait_for(model, "<b>Suspended</b>", "Resumes when you run a cell")
        cell = notebook.begin(
            "import pathlib\nwhile not pathlib.Path('enough').exists():\n    x.add_(1).sum().item()"
        )
        notebook.wait_for(model, "<b>Running</b>", "this notebook (Running")
        (tmp_path / "enough").touch()
        notebook.finish(cell)
        notebook.wait_for(model, "<b>Suspended</b>")


def test_buttons_act_on_the_session() -> None:
    with page() as notebook:
        notebook.run(USE)
        model = notebook.show(SHOW)
        notebook.click(model, view_model.SUSPEND)
        notebook.wait_for(model, "<b>Suspended</b> by you in the notebook. Resumes when")
        notebook.click(model, view_model.RESUME)
        notebook.wait_for(model, "<b>Idle</b>", "4.0 MiB of 1.0 GiB on Simulated GPU 0")
        notebook.toggle(model, view_model.PIN, on=True)
        notebook.wait_for(model, "Pinned: its memory stays on Simulated GPU 0.")
        assert wait_for_session(lambda found: found["pinned"])
        notebook.run("%sing unpin")
        pin = notebook.button(model, view_model.PIN)
        notebook.wait(lambda: not notebook.models[pin]["value"])
        notebook.click(model, view_model.CHECKPOINT)
        notebook.wait_for(model, "Saved checkpoint ", " on disk)", "Last checkpoint: ")
        assert [each for _, each in names()] == [["namespace"]]
        assert notebook.run("print(x.sum().item())").stdout == f"{float(1 << 20)}\n"


def test_suspended_notebook_is_saved_by_the_widget() -> None:
    with page() as notebook:
        notebook.run(USE)
        model = notebook.show(SHOW)
        suspend_from_outside()
        notebook.wait_for(model, "<b>Suspended</b> by a test")
        notebook.click(model, view_model.CHECKPOINT)
        notebook.wait_for(model, "Saved checkpoint ", " on disk)")


def test_widgets_share_a_thread_which_ends_with_the_last() -> None:
    with page() as notebook:
        models = [notebook.show("from jupyter_sing import widget\nwidget.status()") for _ in "abc"]
        model = notebook.show(SHOW)
        assert notebook.run(THREADS.format(1)).stdout == "1\n"
        notebook.run("w.close()")
        notebook.wait(lambda: model not in notebook.models)
        notebook.run(USE)
        for each in models:  # the others still receive updates
            notebook.wait_for(each, "4.0 MiB of 1.0 GiB on Simulated GPU 0")
            none = {"method": "update", "state": {"_view_count": 0}, "buffer_paths": []}
            notebook.send(each, none)  # the page has dropped its view
        assert notebook.run(THREADS.format(0)).stdout == "0\n"


def test_widget_finds_the_next_daemon() -> None:
    with page() as notebook:
        notebook.run(USE)
        model = notebook.show(SHOW)
        notebook.wait_for(model, "<b>Idle</b>")
        os.kill(agent_pid(), signal.SIGKILL)
        notebook.wait_for(model, f"<b>{view_model.NO_DAEMON}</b>")
        notebook.wait_for(model, "this notebook (")
        notebook.click(model, view_model.SUSPEND)
        notebook.wait_for(model, "<b>Suspended</b>")


def test_widget_is_saved_with_the_notebook_and_live_after_restore() -> None:
    with page() as notebook:
        notebook.run(USE)
        model = notebook.show(SHOW)
        said = notebook.run("%sing checkpoint mine").stdout
        assert "not saved" not in said
        notebook.run("del w, x")
        assert notebook.run("%sing restore mine").stdout.startswith("Restored ")
        again = notebook.show("w")
        assert again != model
        suspend_from_outside()
        for each in (model, again):  # the one shown before the restore is still in the page
            notebook.wait_for(each, "<b>Suspended</b>")
    with page() as other:
        assert other.run("%sing restore mine").stdout.startswith("Restored ")
        other.wait_for(other.show("w"), "<b>Idle</b>")


def test_widget_without_ipywidgets_is_a_table() -> None:
    with page() as notebook:
        ran = notebook.run(f"import sys; sys.modules['ipywidgets'] = None\n{SHOW}")
        assert ran.error == ""
        (shown,) = notebook.displayed
        assert set(shown) == {"text/plain", "text/html"}
        assert view_model.WITHOUT_WIDGETS in shown["text/plain"]
        assert "cpu:1" in shown["text/plain"]


@pytest.fixture
def _saves_processes(monkeypatch: pytest.MonkeyPatch, runtime_dir: Path) -> None:
    try:
        monkeypatch.setenv(forms.VARIABLE, forms.find_criu())
        # The daemon then knows the result: on a slow machine its probe takes longer than kernels
        # wait.
        monkeypatch.setattr(forms, "STEP_SECONDS", SECONDS_MAX)
        forms.find(runtime_dir)
    except ProcessError as error:
        if forms.VARIABLE in os.environ:
            raise
        pytest.skip(str(error))
    monkeypatch.delenv("JUPYTER_SING_SAVE_PROCESS")


@pytest.mark.usefixtures("_saves_processes")
def test_process_with_a_widget_is_saved_and_restored() -> None:
    def works(notebook: WidgetKernel, model: str) -> None:
        notebook.click(model, view_model.SUSPEND)
        notebook.wait_for(model, "<b>Suspended</b>")
        notebook.click(model, view_model.RESUME)
        notebook.wait_for(model, "<b>Idle</b>")

    with page() as notebook:
        notebook.run(USE)
        model = notebook.show(SHOW)
        notebook.click(model, view_model.CHECKPOINT)
        notebook.wait_for(model, "Saved checkpoint ", " on disk)")
        ((name, saved),) = names()
        assert saved == ["namespace", "process"]
        works(notebook, model)
        assert notebook.displayed[0][WIDGET]["model_id"] == model
        notebook.run("x.zero_()")
        assert "with the process" in notebook.run(f"%sing restore {name}").stdout
        notebook.wait_for(model, "<b>Suspended</b> Restored from a checkpoint")
        notebook.click(model, view_model.RESUME)
        notebook.wait_for(model, "<b>Idle</b>")
        works(notebook, model)
        assert notebook.run("print(x.sum().item())").stdout == f"{float(1 << 20)}\n"
