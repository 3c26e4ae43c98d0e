"""Kernels whose session has ended are notified, with the command that restores the notebook."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from jupyter_sing import lost_sessions
from jupyter_sing.lost_sessions import KernelWithSession
from kernelproxy.common.protocol.views import CheckpointView, SessionView
from tests.unit.fake_daemon import CHECKPOINT, SESSION

ONE = KernelWithSession("k-1", "0123abcd", "/home/ada/digits.ipynb")


def test_sessions_of_kernels_are_read_from_their_provisioners() -> None:
    with_session = SimpleNamespace(session=ONE.session, notebook=ONE.notebook)
    kernels = {
        "k-1": SimpleNamespace(provisioner=with_session),
        "k-2": SimpleNamespace(provisioner=SimpleNamespace(session="")),
        "k-3": SimpleNamespace(provisioner=object()),  # another package's provisioner
        "k-4": SimpleNamespace(provisioner=None),
    }
    manager = SimpleNamespace(list_kernel_ids=lambda: list(kernels), get_kernel=kernels.get)
    assert lost_sessions.Kernels(manager).with_session() == {ONE}


@pytest.mark.parametrize(
    ("after", "known", "gone"),
    [
        ({ONE}, [], [ONE]),
        ({ONE}, [SESSION], []),
        # It was closed, or opened, during the request to the daemon.
        (set(), [], []),
        # Another process has replaced the kernel's, with another session.
        ({ONE}, [SESSION | {"id": "another"}], []),
        ({ONE}, [SESSION | {"id": "another", "kernel_id": "k-9"}], [ONE]),
    ],
)
def test_lost_sessions_are_those_unknown_to_the_daemon(
    after: set[KernelWithSession], known: list[SessionView], gone: list[KernelWithSession]
) -> None:
    assert lost_sessions.lost({ONE}, after, known) == gone


def test_lost_sessions_are_described_with_their_last_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = CHECKPOINT | {"kernel_id": "k-9", "notebook": "", "name": "other"}
    mine = CHECKPOINT | {"kernel_id": "k-8", "notebook": ONE.notebook}
    damaged: CheckpointView = {"name": "damaged", "created": "", "problem": "It is damaged."}

    async def stored() -> list[CheckpointView]:
        return [damaged, others, mine]

    monkeypatch.setattr(lost_sessions, "_on_disk", stored)
    (found,) = asyncio.run(lost_sessions.described([ONE]))
    assert found.keys() == SESSION.keys()
    assert (found["state"], found["kernel_id"], found["memory"]) == ("failed", "k-1", 0)
    assert found["last_checkpoint"] is not None
    assert found["last_checkpoint"]["name"] == mine["name"]
    assert mine["name"] in found["reason"]
    (other,) = asyncio.run(lost_sessions.described([KernelWithSession("k-5", "5", "")]))
    assert other["last_checkpoint"] is None
    assert other["reason"] == lost_sessions.REASON


def test_lost_sessions_have_no_checkpoint_without_a_store() -> None:
    assert asyncio.run(lost_sessions._on_disk()) == asyncio.run(lost_sessions.stored()) == []
