"""Texts of the widget, from the daemon's updates."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from jupyter_sing.notebook import status_text, view_model
from jupyter_sing.notebook.status_watcher import KnownStatus
from jupyter_sing.notebook.view_model import View
from kernelproxy.agent.session.states import State
from kernelproxy.common.protocol.views import DeviceView, OutsideView, SessionView
from tests.unit.fake_daemon import DEVICE, SESSION, changed

ID = SESSION["id"]
GIB = 1 << 30


def seen(*others: SessionView, **changes: Any) -> KnownStatus:
    sessions = [changed(SESSION, changes), *others]
    return KnownStatus((DEVICE, DEVICE | {"id": "cpu:1"}), {each["id"]: each for each in sessions})


def of(**changes: Any) -> View:
    return View.of(seen(**changes), ID)


def test_state_has_a_word_and_a_distinct_glyph() -> None:
    shown = [of(state=str(state)) for state in State]
    assert [each.word for each in shown] == [status_text.WORDS[str(state)] for state in State]
    assert len({each.glyph for each in shown}) == len(State)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"reason": "Idle. Suspends soon."}, "○ Idle. Suspends soon."),
        ({"state": "running", "reason": "Works."}, "▶ Running: Works."),
        ({"state": "suspended", "reason": ""}, "❚❚ Suspended: Resumes when its owner runs a cell."),
        ({"state": "failed", "reason": "It broke."}, "⚠ Error: It broke."),
        ({"state": "dreaming", "reason": "Who knows."}, "? Dreaming: Who knows."),
    ],
)
def test_first_line_has_state_and_next_event(changes: dict[str, Any], expected: str) -> None:
    assert of(**changes).lines()[0] == expected


@pytest.mark.parametrize(
    ("changes", "memory", "share"),
    [
        ({}, "3.0 MiB of 2.0 GiB on Simulated GPU 0", (3 << 20, 2 * GIB)),
        ({"tier": "parked", "operators": 0}, "Nothing on Simulated GPU 0 yet", None),
        ({"tier": "parked"}, "in host memory, moved from Simulated GPU 0", None),
        (
            {"tier": "cold", "snapshot": {"bytes": GIB}},
            "1.0 GiB on disk, moved from Simulated GPU 0",
            None,
        ),
        ({"device": "cpu:9"}, "3.0 MiB on Simulated GPU 9", None),
    ],
)
def test_memory_text_names_the_location(
    changes: dict[str, Any], memory: str, share: tuple[int, int] | None
) -> None:
    assert (of(**changes).memory, of(**changes).share) == (memory, share)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"queue_position": None, "expected_wait": None}, ""),
        ({"state": "queued"}, "Waiting time unknown."),
        (
            {"state": "queued", "queue_position": 1, "expected_wait": 0.2},
            "You are next, any moment now.",
        ),
        (
            {"state": "queued", "queue_position": 3, "expected_wait": 170.0},
            "Place 3 in the queue, about 3 min.",
        ),
        (
            {"state": "queued", "queue_position": 2, "expected_wait": None},
            "Place 2 in the queue.",
        ),
    ],
)
def test_queue_text_shows_what_is_known(changes: dict[str, Any], expected: str) -> None:
    assert of(**changes).queue == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {view_model.SUSPEND, view_model.PIN, view_model.CHECKPOINT}),
        ({"state": "suspended"}, {view_model.RESUME, view_model.PIN, view_model.CHECKPOINT}),
        ({"state": "failed"}, set()),
        (
            {"progress": {"verb": "checkpoint", "checkpoint": "one", "done": 0, "total": 0}},
            {view_model.SUSPEND, view_model.PIN},
        ),
    ],
)
def test_buttons_without_effect_are_disabled(changes: dict[str, Any], expected: set[str]) -> None:
    assert of(**changes).can == expected


def test_progress_is_a_bar_if_its_size_is_known() -> None:
    under_way = {"verb": "checkpoint", "checkpoint": "one", "done": 0, "total": 0}
    shown = of(progress=under_way)
    assert shown.progress_html() == "<div>Saving one …</div>"
    shown = of(progress=under_way | {"verb": "restore", "done": GIB, "total": 2 * GIB})
    assert shown.progress == "Restoring one: 1.0 GiB of 2.0 GiB"
    assert f'<progress value="{GIB}" max="{2 * GIB}"' in shown.progress_html()
    assert shown.progress in shown.lines()


def test_table_lists_sessions_of_each_device() -> None:
    others = (
        SESSION | {"id": "b", "name": "maths.ipynb", "state": "running", "device": "cpu:1"},
        SESSION | {"id": "c", "name": "", "device": "cpu:1"},
        SESSION | {"id": "d", "name": "waits.ipynb", "state": "queued", "tier": "parked"},
    )
    rows = view_model.devices_table(seen(*others), ID).rows
    assert rows == [
        ("Simulated GPU 0 (cpu:0)", "3.0 MiB of 2.0 GiB", "this notebook (Idle, 3.0 MiB)", "1"),
        (
            "Simulated GPU 1 (cpu:1)",
            "6.0 MiB of 2.0 GiB",
            "maths.ipynb (Running, 3.0 MiB), another user's (Idle, 3.0 MiB)",
            "",
        ),
    ]
    assert view_model.devices_table(seen(tier="parked"), ID).rows[0][2] == "no session"


def test_table_marks_devices_that_are_out_of_use() -> None:
    failed = DEVICE | {"failure": "GPU 0 is out of use: the driver has lost it."}
    rows = view_model.devices_table(KnownStatus((failed,), {ID: SESSION}), ID).rows
    assert rows[0][1] == "3.0 MiB of 2.0 GiB, out of use"


def test_unknown_state_has_a_text() -> None:
    assert View.of(None, ID).text() == view_model.WAITING
    gone = View.of(KnownStatus((DEVICE,), {}), ID)
    assert gone.lines() == [f"? {view_model.GONE}: {view_model.UNKNOWN}"]
    silent = View.of(KnownStatus((DEVICE,), {ID: SESSION}, problem="It is being replaced."), ID)
    assert silent.lines() == [f"? {view_model.NO_DAEMON}: It is being replaced."]
    assert silent.can == frozenset()


def test_names_are_escaped_in_html() -> None:
    shown = View.of(seen(SESSION | {"id": "b", "name": "<i>"}, reason="<b>", pinned=True), ID)
    text = shown.html(view_model.static_note(datetime(2026, 1, 1)))
    assert "<i> (" not in text
    assert "&lt;i&gt;" in text
    assert "&lt;b&gt;" in text
    assert "2026-01-01 00:00:00" in text
    assert shown.text("beneath").endswith("\n\nbeneath")
    assert "Pinned: stays on its GPU" in shown.lines()
    assert view_model.message_html(["<b>"]) == '<div role="status">&lt;b&gt;</div>'
    assert view_model.message_html([]) == ""
    assert "2026-01-01 00:00:00" in view_model.since_html(datetime(2026, 1, 1))


@pytest.mark.parametrize(
    ("changes", "following"),
    [
        ({"state": "running"}, "running now"),
        ({"state": "queued", "queue_position": 1, "expected_wait": 2.8}, "next turn in about 3 s"),
        ({"state": "suspended", "queue_position": 2}, "waiting for the next turn"),
    ],
)
def test_sharing_text_is_the_same_everywhere(changes: dict[str, Any], following: str) -> None:
    shared = {"devices": ["cpu:0"], "with": ["bob", "b.ipynb"], "share": 0.5}
    text = "Sharing Simulated GPU 0 with bob and 1 more · my share 50 %"
    found = of(shared=shared, **changes)
    assert (found.glyph, found.word) == ("▶", "Sharing")
    assert found.lines()[0] == f"▶ {text} · {following}"
    session = changed(SESSION, {"shared": shared} | changes)
    assert status_text.state_text(session) == f"{text} · {following}"


def test_processes_outside_of_sessions_are_named() -> None:
    assert status_text.outside_lines([DEVICE], [SESSION]) == []
    outside: OutsideView = {
        "memory": 3 << 30,
        "contexts": 0,
        "complete": True,
        "processes": [
            {"pid": 7, "user": "ada", "command": "python train.py", "memory": 3 << 30},
            {"pid": 8, "user": "bob", "command": "python -m ipykernel", "memory": None},
        ],
    }
    device: DeviceView = {**DEVICE, "id": "cuda:0", "outside": outside}
    direct: SessionView = {**SESSION, "kernel_pid": 8, "name": "cupy.ipynb"}
    assert status_text.outside_lines([device], [direct]) == [
        "GPU 0: 3.0 GiB is used outside of sessions by process 7 (ada: python train.py).",
        "GPU 0: memory is used outside of sessions by process 8 (bob: python -m ipykernel, the "
        "kernel of session cupy.ipynb).",
    ]
