"""Jupyter's managers and kernels that outlive their server; kernels are toys here."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_server.services.contents.filemanager import FileContentsManager
from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager
from jupyter_server.services.sessions.sessionmanager import KernelName, ModelName, SessionManager
from traitlets.config import Config

from jupyter_sing.server import reattach
from jupyter_sing.server.reattach import Reattachment
from kernelproxy.kernel_host import client
from tests.integration.conftest import lives

# A kernel that answers nothing, which makes it count as busy.
SPECIFICATION = {
    "argv": [sys.executable, "-c", "import time\nwhile True: time.sleep(1)", "{connection_file}"],
    "display_name": "toy", "language": "none",
}  # fmt: skip
LOG = logging.getLogger("toy server")


class Toy:
    """The relevant parts of a server application, started in a directory."""

    def __init__(self, root: Path, provisioner: str = "sing") -> None:
        directory = root / "kernels" / "toy"
        directory.mkdir(parents=True, exist_ok=True)
        chosen = {"kernel_provisioner": {"provisioner_name": provisioner}}
        (directory / "kernel.json").write_text(json.dumps({**SPECIFICATION, "metadata": chosen}))
        self.root_dir, self.base_url, self.config = str(root), "/", Config()
        self.event_logger = None
        self.kernel_manager = AsyncMappingKernelManager(
            root_dir=str(root), connection_dir=str(root),
            config=Config({"KernelManager": {"shutdown_wait_time": 0.1}}),
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(root / "kernels")]),
        )  # fmt: skip
        self.session_manager = SessionManager(
            kernel_manager=self.kernel_manager,
            contents_manager=FileContentsManager(root_dir=str(root)),
        )
        app: Any = SimpleNamespace(**vars(self))
        app.kernel_manager.parent = None
        self.reattachment = Reattachment(app, 600, LOG)

    async def adopt(self) -> list[dict[str, Any]]:
        await self.reattachment.adopt()
        found: list[dict[str, Any]] = await self.session_manager.list_sessions()
        return found

    def pid(self, kernel_id: str) -> int:
        provisioner: Any = self.kernel_manager.get_kernel(kernel_id).provisioner
        return int(provisioner.pid)

    def leave(self) -> None:
        self.reattachment.leave()
        self.session_manager.close()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reattach, "ANSWER_SECONDS", 0.05)


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a sequence of servers; end the kernels that they leave."""
    try:
        asyncio.run(story())
    finally:
        client.end_kernels()


async def started(toy: Toy) -> dict[str, Any]:
    found: dict[str, Any] = await toy.session_manager.create_session(
        path="a.ipynb", name=ModelName("a.ipynb"), type="notebook", kernel_name=KernelName("toy")
    )
    return found


def test_kernel_and_session_keep_their_ids(runtime_dir: Path, tmp_path: Path) -> None:
    async def story() -> None:
        first = Toy(tmp_path)
        session = await started(first)
        kernel_id = session["kernel"]["id"]
        await first.session_manager.update_session(session["id"], name="b.ipynb")
        pid = first.pid(kernel_id)
        ports = first.kernel_manager.get_kernel(kernel_id).ports
        first.leave()
        assert len(first.kernel_manager) == 0
        assert (tmp_path / f"kernel-{kernel_id}.json").exists()

        second = Toy(tmp_path)
        (found,) = await second.adopt()
        assert (found["id"], found["kernel"]["id"]) == (session["id"], kernel_id)
        assert found["kernel"]["execution_state"] == "busy"
        assert (second.pid(kernel_id), lives(pid)) == (pid, True)
        kernel: Any = second.kernel_manager.get_kernel(kernel_id)
        assert kernel.ports == ports
        assert kernel._launch_args["env"]["JPY_SESSION_NAME"] == str(tmp_path / "b.ipynb")
        await kernel.restart_kernel(now=True)
        assert (kernel.ports, second.pid(kernel_id) != pid) == (ports, True)
        assert not lives(pid)
        await second.reattachment.end()
        assert len(second.kernel_manager) == 0
        assert not list((runtime_dir / "servers").iterdir())
        second.session_manager.close()

    run(story)


def test_kernel_that_cannot_be_adopted_is_left_for_another_server(
    runtime_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        first = Toy(tmp_path)
        kernel_id = (await started(first))["kernel"]["id"]
        pid = first.pid(kernel_id)
        first.leave()
        for provisioner, why in (
            ("local-provisioner", "its provisioner is local-provisioner now"),
            ("nobody's", "NoSuchKernel: No such kernel named toy"),
        ):
            other = Toy(tmp_path, provisioner)
            assert await other.adopt() == []
            assert f"kernel {kernel_id} is not found again: {why}" in caplog.text
            other.leave()
        again = Toy(tmp_path)
        await again.reattachment.adopt()
        assert again.pid(kernel_id) == pid
        await again.reattachment.end()
        again.session_manager.close()

    run(story)


def test_session_database_of_the_user_is_not_replaced(runtime_dir: Path, tmp_path: Path) -> None:
    toy = Toy(tmp_path)
    assert Path(toy.session_manager.database_filepath).parent.parent == runtime_dir / "servers"
    toy.leave()
    mine = str(tmp_path / "mine.db")
    app: Any = SimpleNamespace(**vars(toy))
    app.session_manager.database_filepath = mine
    second = Reattachment(app, 600, LOG)
    assert app.session_manager.database_filepath == mine
    second.close()
    app.config.SessionManager.database_filepath = ":memory:"
    app.session_manager.database_filepath = ":memory:"
    third = Reattachment(app, 600, LOG)
    assert app.session_manager.database_filepath == ":memory:"
    third.close()
