"""The widget shows the daemon's updates, and its buttons send the requests that they name."""

from __future__ import annotations

import builtins
import pickle
import queue
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_sing.notebook import status_watcher, view_model, widget
from jupyter_sing.notebook.widget import LiveStatus, StatusPanel
from kernelproxy.common import protocol
from kernelproxy.common.ipc import detach
from kernelproxy.common.ipc.detach import Absence
from kernelproxy.kernel import activation
from tests.unit.fake_daemon import SESSION, FakeDaemon, changed
from tests.unit.jupyter.test_status_watcher import SECONDS, wait_for_no_thread

ID = SESSION["id"]
CLICK = {"content": {"data": {"method": "custom", "content": {"event": "click"}}}, "buffers": []}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, fake_daemon: FakeDaemon) -> Iterator[None]:
    """Act as the kernel of the daemon's session."""
    monkeypatch.setattr(activation.state, "_current", activation.Activation(session=ID))
    monkeypatch.setattr(detach, "current", Absence())
    monkeypatch.setattr(status_watcher, "current", status_watcher.StatusWatcher())
    monkeypatch.setattr(widget, "FIRST_SECONDS_MAX", SECONDS)
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=object()))
    yield
    for each in list(status_watcher.current._listeners):
        status_watcher.current.leave(each)
    wait_for_no_thread()


class ShownWidget:
    """A status widget and its model; waits for the texts that it shows."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self.daemon, self.changed = daemon, queue.Queue[None]()
        self.status = LiveStatus()
        self.bundle = self.status._repr_mimebundle_()
        panel = self.status._panel
        assert panel is not None
        self.panel: StatusPanel = panel
        for each in panel._widgets():
            each.observe(lambda _: self.changed.put(None))

    def wait(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.get(timeout=SECONDS)

    def tell(self, **changes: Any) -> None:
        self.daemon.sessions[ID] = changed(self.daemon.sessions[ID], changes)
        self.daemon.tell(self.daemon.sessions[ID])

    def button(self, name: str) -> Any:
        return self.panel._buttons[name]

    def click(self, name: str) -> None:
        self.button(name)._handle_msg(CLICK)

    def can(self) -> set[str]:
        return {name for name, each in self.panel._buttons.items() if not each.disabled}

    @property
    def text(self) -> str:
        return "".join(
            each.value for each in (self.panel._state, self.panel._far, self.panel._message_box)
        )


@pytest.fixture
def shown(kernel: None, fake_daemon: FakeDaemon) -> Iterator[ShownWidget]:
    made = ShownWidget(fake_daemon)
    yield made
    made.status.close()


def test_widget_shows_the_state_and_its_changes(shown: ShownWidget) -> None:
    assert "<b>Idle</b>." in shown.text
    assert "this notebook (Idle, 3.0 MiB)" in shown.panel._devices.value
    assert shown.can() == {view_model.SUSPEND, view_model.PIN, view_model.CHECKPOINT}
    shown.tell(state="suspended", tier="parked", reason="Not used. Resumes when you run a cell.")
    shown.wait(lambda: "Suspended" in shown.text and not shown.button(view_model.RESUME).disabled)
    assert view_model.SUSPEND not in shown.can()
    shown.tell(state="queued", reason="Waits.", queue_position=2, expected_wait=20.0)
    shown.wait(lambda: "Place 2 in the queue, about 20 s." in shown.text)


def test_widget_sends_nothing_without_a_visible_change(shown: ShownWidget) -> None:
    received: queue.Queue[object] = queue.Queue()
    status_watcher.current.join(received.put)
    received.get(timeout=SECONDS)
    while not shown.changed.empty():
        shown.changed.get()
    shown.tell(log_head=101)
    received.get(timeout=SECONDS)  # the widget joined before, so it was notified before
    assert shown.changed.empty()


def test_text_without_widgets_has_its_time(shown: ShownWidget) -> None:
    assert shown.bundle["text/plain"].startswith("○ Idle.\n3.0 MiB of 2.0 GiB on Simulated GPU 0\n")
    assert "; not updated." in shown.bundle["text/plain"]
    assert "<progress" in shown.bundle["text/html"]
    found = shown.bundle["application/vnd.jupyter.widget-view+json"]
    assert found["model_id"] == shown.status.box.model_id


def test_buttons_send_requests_to_the_daemon(shown: ShownWidget) -> None:
    def asked(request: protocol.Message) -> bool:
        return request in shown.daemon.requests

    shown.click(view_model.SUSPEND)
    shown.wait(lambda: asked(protocol.Suspend(ID, "Suspended by you in the notebook")))
    shown.wait(lambda: view_model.RESUME in shown.can())
    shown.click(view_model.RESUME)
    shown.wait(lambda: asked(protocol.Resume(ID)))
    shown.wait(lambda: view_model.SUSPEND in shown.can() and "Idle" in shown.text)
    shown.button(view_model.PIN).set_state({"value": True})
    shown.wait(lambda: "Pinned: its memory stays on Simulated GPU 0." in shown.text)
    assert shown.button(view_model.PIN).value
    shown.button(view_model.PIN).set_state({"value": False})
    shown.wait(lambda: "Not pinned" in shown.text)
    shown.click(view_model.CHECKPOINT)
    shown.wait(lambda: "Saved checkpoint digits-2" in shown.text)
    (request,) = (r for r in shown.daemon.requests if isinstance(r, protocol.Checkpoint))
    assert request.name.startswith("digits-2")
    assert "not saved: /home/ada/big.csv" in shown.text
    kinds = [each.wire_kind for each in shown.daemon.requests]
    assert kinds == ["Watch", "Suspend", "Resume", "Pin", "Pin", "Checkpoint"]


def test_pin_set_elsewhere_is_shown_and_not_requested(shown: ShownWidget) -> None:
    shown.tell(pinned=True)
    shown.wait(lambda: shown.button(view_model.PIN).value)
    shown.tell(reason="Later.")
    shown.wait(lambda: "Later." in shown.text)
    assert not any(isinstance(each, protocol.Pin) for each in shown.daemon.requests)


def test_refusal_of_the_daemon_is_shown(shown: ShownWidget) -> None:
    del shown.daemon.sessions[ID]
    shown.button(view_model.PIN).set_state({"value": True})
    shown.wait(lambda: f"There is no session {ID}." in shown.text)
    shown.wait(lambda: not shown.button(view_model.PIN).value)


def test_bar_is_shown_after_half_a_second(
    shown: ShownWidget, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock: SimpleNamespace = SimpleNamespace(
        monotonic=lambda: clock.now, strftime=lambda _: "", now=1.0
    )
    monkeypatch.setattr(widget, "time", clock)
    under_way = {"verb": "checkpoint", "checkpoint": "one", "done": 1, "total": 4}
    shown.tell(progress=under_way)
    shown.wait(lambda: shown.button(view_model.CHECKPOINT).disabled)
    assert "<progress" not in shown.panel._far.value
    clock.now = 1.5
    shown.tell(progress=under_way | {"done": 2})
    shown.wait(lambda: 'value="2" max="4"' in shown.panel._far.value)
    shown.tell(progress=None)
    shown.wait(lambda: shown.panel._far.value == "")


def test_widget_without_views_does_not_listen(shown: ShownWidget) -> None:
    shown.status.box.set_state({"_view_count": 1})
    shown.status.box.set_state({"_view_count": 0})
    wait_for_no_thread()
    shown.daemon.sessions[ID] |= {"reason": "Meanwhile."}
    shown.status.box.set_state({"_view_count": 1})
    shown.wait(lambda: "Meanwhile." in shown.text)


def test_widget_is_sent_whole_over_a_new_connection(
    shown: ShownWidget, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: queue.Queue[str] = queue.Queue()
    states: list[str] = []
    shown.panel._state.observe(lambda change: states.append(change["new"]), "value")
    monkeypatch.setattr(type(shown.status.box), "send_state", lambda *_: sent.put("box"))
    shown.daemon.drop_watchers()
    shown.wait(lambda: any(view_model.NO_DAEMON in each for each in states))
    assert sent.get(timeout=SECONDS) == "box"
    shown.wait(lambda: "Idle" in shown.text)


def test_closing_ends_the_widget_with_a_note(shown: ShownWidget) -> None:
    shown.status.close()
    shown.status.close()
    wait_for_no_thread()
    assert repr(shown.status) == view_model.CLOSED
    assert shown.status.box is None
    assert shown.panel.box.comm is None


def test_closing_all_widgets_ends_the_watcher(shown: ShownWidget) -> None:
    shown.panel.box.close()
    shown.tell()
    wait_for_no_thread()


def test_widget_is_pickled_as_its_constructor(kernel: None) -> None:
    other = pickle.loads(pickle.dumps(LiveStatus()))
    assert type(other) is LiveStatus
    assert other._panel is None  # no subscription before it is shown


def test_widget_without_ipywidgets_is_a_table(
    kernel: None, fake_daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = builtins.__import__

    def lacking(name: str, *arguments: Any) -> Any:
        if name == "ipywidgets":
            raise ImportError(name)
        return usual(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", lacking)
    bundle = LiveStatus()._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}
    assert view_model.WITHOUT_WIDGETS in bundle["text/plain"]
    assert "this notebook (Idle" in bundle["text/plain"]


def test_widget_without_a_session_shows_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation.state, "_current", activation.Activation())
    assert repr(LiveStatus()) == "CPU only: this kernel was started without a GPU session"
    monkeypatch.setenv("SING_REASON", "torch <2")
    assert LiveStatus()._repr_mimebundle_()["text/html"].endswith("CPU only: torch &lt;2</div>")
