"""The server extension: configuration, REST and events of device sessions."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

from jupyter_server.extension.application import ExtensionApp
from traitlets import Float, Int, Unicode, default

from jupyter_sing import lost_sessions
from jupyter_sing.server import routes
from jupyter_sing.server.defaults import use_provisioner
from jupyter_sing.server.event_publisher import Feed
from jupyter_sing.server.notebooks import NotebookNames
from jupyter_sing.server.reattach import Reattachment
from kernelproxy.common import environment
from kernelproxy.common.errors import SingError
from kernelproxy.provisioning.events import EVENT_ID

EVENT_SCHEMA = Path(__file__).parent / "events" / "session-v1.yaml"


class SingExtension(ExtensionApp):
    """``jupyter_sing``: server extension for device sessions.

    The sessions themselves live in the daemon, and the kernels in the kernel host. Both outlive
    this server.
    """

    name = "jupyter_sing"
    extension_url = "/jupyter-sing"
    description = "GPU sessions of notebooks: suspended when idle, resumed by the next cell."

    idle_timeout = Float(
        allow_none=True,
        help="Seconds without use after which a session is suspended; 0: never. Default: "
        "JUPYTER_SING_IDLE_TIMEOUT, else the policy's value, else 600.",
    ).tag(config=True)

    cold_after = Float(
        help="Seconds without use after which a suspended state is spilled to disk; 0: never. "
        "Default: JUPYTER_SING_COLD_AFTER, else 3600.",
    ).tag(config=True)

    host_memory = Unicode(
        help="Host memory for logs and suspended states, such as 16GiB. If more is used, the "
        "states that were unused for longest are spilled to disk. Default: "
        "JUPYTER_SING_HOST_MEMORY, else half of the machine's memory.",
    ).tag(config=True)

    disk_quota = Unicode(
        help="Disk space for spilled states, checkpoints and hibernating kernels, such as 100GiB. "
        "Default: JUPYTER_SING_DISK_QUOTA, else 64GiB.",
    ).tag(config=True)

    policy = Unicode(
        help="Policy file, which sets which users may use which devices (docs/policy.md); applied "
        "when the daemon starts. Default: JUPYTER_SING_POLICY, else the policy applied last.",
    ).tag(config=True)

    checkpoint_every = Float(
        help="Seconds between two automatic checkpoints of a notebook that runs cells; 0: not by "
        "time. Default: JUPYTER_SING_CHECKPOINT_EVERY, else 0.",
    ).tag(config=True)

    checkpoint_cells = Int(
        help="Cells between two automatic checkpoints; 0: not by number of cells. Default: "
        "JUPYTER_SING_CHECKPOINT_CELLS, else 0.",
    ).tag(config=True)

    checkpoint_keep = Int(
        help="Number of automatic checkpoints of a notebook that are kept. Default: "
        "JUPYTER_SING_CHECKPOINT_KEEP, else 3.",
    ).tag(config=True)

    hibernate_timeout = Float(
        help="Seconds without use after which a notebook is hibernated: its GPU memory and, where "
        "possible, its process are moved to disk; 0: never. Default: "
        "JUPYTER_SING_HIBERNATE_TIMEOUT, else 0.",
    ).tag(config=True)

    _feed: Feed | None = None

    keep_kernels = Float(
        help="Seconds for which kernels keep running without a server after this one was ended by "
        "a signal or died; a new server reattaches them. 0: they end with the server. Default: "
        "JUPYTER_SING_KEEP_KERNELS, else 86400.",
    ).tag(config=True)

    _reattachment: Reattachment | None = None
    _adopted = False
    _terminated = False  # by a signal, which does not request the end of kernels

    @default("keep_kernels")
    def _default_keep_kernels(self) -> float:
        return environment.number("KEEP_KERNELS", 86400, self.log)

    @default("hibernate_timeout")
    def _default_hibernate_timeout(self) -> float:
        return environment.number("HIBERNATE_TIMEOUT", 0, self.log)

    @default("checkpoint_every")
    def _default_checkpoint_every(self) -> float:
        return environment.number("CHECKPOINT_EVERY", 0, self.log)

    @default("checkpoint_cells")
    def _default_checkpoint_cells(self) -> int:
        return int(environment.number("CHECKPOINT_CELLS", 0, self.log))

    @default("checkpoint_keep")
    def _default_checkpoint_keep(self) -> int:
        return int(environment.number("CHECKPOINT_KEEP", 3, self.log))

    @default("cold_after")
    def _default_cold_after(self) -> float:
        return environment.number("COLD_AFTER", 3600, self.log)

    @default("host_memory")
    def _default_host_memory(self) -> str:
        return os.environ.get("JUPYTER_SING_HOST_MEMORY", "")

    @default("disk_quota")
    def _default_disk_quota(self) -> str:
        return os.environ.get("JUPYTER_SING_DISK_QUOTA", "")

    @default("policy")
    def _default_policy(self) -> str:
        return os.environ.get("JUPYTER_SING_POLICY", "")

    @default("idle_timeout")
    def _default_idle_timeout(self) -> float | None:
        return environment.asked_number("IDLE_TIMEOUT", self.log)

    def initialize_settings(self) -> None:
        """Called by the server once, before handlers are made and kernels start."""
        # Provisioners and the daemon read these variables, not this application's configuration.
        for name in (
            "idle_timeout", "hibernate_timeout", "cold_after",
            "checkpoint_every", "checkpoint_cells", "checkpoint_keep",
        ):  # fmt: skip
            if (given := getattr(self, name)) is not None:
                os.environ[f"JUPYTER_SING_{name.upper()}"] = str(given)
        for name in ("host_memory", "disk_quota"):
            if value := getattr(self, name):
                os.environ[f"JUPYTER_SING_{name.upper()}"] = value
        if self.policy:
            os.environ["JUPYTER_SING_POLICY"] = os.path.abspath(self.policy)
        if self.serverapp is None or self.serverapp.event_logger is None:
            return
        use_provisioner(self.serverapp)
        self.serverapp.event_logger.register_event_schema(EVENT_SCHEMA)
        names = NotebookNames(self.serverapp.session_manager)
        self.settings["jupyter_sing_notebooks"] = names
        self.settings["jupyter_sing_kernels"] = lost_sessions.Kernels(self.serverapp.kernel_manager)
        emit = self.serverapp.event_logger.emit
        self._feed = Feed(lambda data: emit(schema_id=EVENT_ID, data=data), names, self.log)
        self._keep_kernels()

    def _keep_kernels(self) -> None:
        """Let kernels outlive this server, and adopt those that a server before it has left."""
        app: Any = self.serverapp
        if self.keep_kernels <= 0 or app.gateway_config.gateway_enabled:
            return
        try:
            self._reattachment = Reattachment(app, self.keep_kernels, self.log)
        except (SingError, OSError) as error:
            self.log.warning("jupyter_sing: kernels will end with this server: %s", error)
            return
        stop = app._signal_stop
        mains = threading.current_thread() is threading.main_thread()
        if mains and signal.getsignal(signal.SIGTERM) == stop:

            def terminate(number: int, frame: Any) -> None:
                self._terminated = True
                stop(number, frame)

            signal.signal(signal.SIGTERM, terminate)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            # The server does not listen yet, so no client asks for a kernel before it is adopted.
            try:
                app.io_loop.run_sync(self._adopt)
            finally:
                if self._terminated:  # meanwhile: the server was stopped before it started
                    raise SystemExit(0)

    async def _adopt(self) -> None:
        if self._reattachment is not None and not self._adopted:
            self._adopted = True
            await self._reattachment.adopt()

    async def _start_jupyter_server_extension(self, serverapp: Any) -> None:
        """Called by the server when its loop runs; not yet so if it is embedded in another loop."""
        await self._adopt()
        await super()._start_jupyter_server_extension(serverapp)  # type: ignore[no-untyped-call]
        if self._feed is not None:
            self._feed.start()

    async def stop_extension(self) -> None:
        """Called by the server when it ends, before it ends its kernels."""
        if self._feed is not None:
            await self._feed.stop()
        reattachment, self._reattachment = self._reattachment, None  # idempotent
        if reattachment is None:
            return
        if self._terminated:
            reattachment.leave()
        else:
            await reattachment.end()

    def initialize_handlers(self) -> None:
        """Called by the server after `initialize_settings`."""
        self.handlers.extend(routes.handlers())


launch_instance: Any = SingExtension.launch_instance
