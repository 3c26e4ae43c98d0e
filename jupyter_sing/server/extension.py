"""The server extension: configuration, REST and events of device sessions."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

from jupyter_server.extension.application import ExtensionApp

from jupyter_sing import lost_sessions
from jupyter_sing.server import routes
from jupyter_sing.server.defaults import use_provisioner
from jupyter_sing.server.event_publisher import Feed
from jupyter_sing.server.notebooks import NotebookNames
from jupyter_sing.server.reattach import Reattachment
from kernelproxy.common import options
from kernelproxy.common.errors import SingError
from kernelproxy.common.options import Kind, Reader
from kernelproxy.provisioning.events import EVENT_ID
from kernelproxy.provisioning.traits import trait

EVENT_SCHEMA = Path(__file__).parent / "events" / "session-v1.yaml"


class SingExtension(ExtensionApp):
    """``jupyter_sing``: server extension for device sessions.

    The sessions themselves live in the daemon, and the kernels in the kernel host. Both outlive
    this server.
    """

    name = "jupyter_sing"
    extension_url = "/jupyter-sing"
    description = "GPU sessions of notebooks: suspended when idle, resumed by the next cell."

    idle_timeout: float | None = trait(options.IDLE_TIMEOUT, given=True)
    cold_after: float = trait(options.COLD_AFTER)
    host_memory: str = trait(options.HOST_MEMORY)
    disk_quota: str = trait(options.DISK_QUOTA)
    policy: str = trait(options.POLICY)
    checkpoint_every: float = trait(options.CHECKPOINT_EVERY)
    checkpoint_cells: int = trait(options.CHECKPOINT_CELLS)
    checkpoint_keep: int = trait(options.CHECKPOINT_KEEP)
    hibernate_timeout: float = trait(options.HIBERNATE_TIMEOUT)
    keep_kernels: float = trait(options.KEEP_KERNELS)

    _feed: Feed | None = None
    _reattachment: Reattachment | None = None
    _adopted = False
    _terminated = False  # by a signal, which does not request the end of kernels

    def initialize_settings(self) -> None:
        """Called by the server once, before handlers are made and kernels start."""
        # Provisioners and the daemon read these variables, not this application's configuration.
        for option in options.options_of(Reader.SERVER):
            given = getattr(self, option.name)
            if option.readers != {Reader.SERVER} and given not in (None, ""):
                path = option.kind is Kind.PATH
                os.environ[option.variable] = os.path.abspath(given) if path else str(given)
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
