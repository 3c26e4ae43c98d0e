"""Reattaching a restarted server to its kernels; leaving them when a server ends.

`kernelproxy.kernel_host` keeps the kernels of a server. This module updates Jupyter's own managers:
a kernel runs already under its old id, in which state it is, and, when the server ends, that they
no longer manage it. Sessions (which notebook has which kernel) are kept in Jupyter's own table, in
a file of this server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

from jupyter_client.provisioning.factory import KernelProvisionerFactory
from traitlets import TraitError

from jupyter_sing.server.defaults import PROVISIONER
from kernelproxy.common.errors import ControlError, SingError
from kernelproxy.common.protocol import AdoptKernel, LastCheckpoint
from kernelproxy.kernel_host import client, retention
from kernelproxy.kernel_host.client import RemoteKernel
from kernelproxy.kernel_host.retention import Keeping
from kernelproxy.kernel_host.server_records import KernelRecord, ServerDirectory, key_of
from kernelproxy.provisioning import events
from kernelproxy.provisioning.provisioner import SingProvisioner, last_checkpoint

#: An idle kernel answers sooner; one that does not answer is taken for busy.
ANSWER_SECONDS = 2.0
OFFER_SECONDS = 20.0
#: Within this time the death of a server is noticed, on a loaded machine.
MISS_SECONDS = 20.0
#: Jupyter's setting for its sessions unless the user has configured another.
_IN_MEMORY = ":memory:"


class Reattachment:
    """Kernels of a server application that outlive it; retention begins with construction.

    Parameters
    ----------
    app : jupyter_server.serverapp.ServerApp
    seconds : float
        For how long kernels live without a server.
    log : logging.Logger

    Raises
    ------
    SingError, OSError
        If kernels cannot be kept.
    """

    def __init__(self, app: Any, seconds: float, log: Any) -> None:
        self._app, self._log = app, log
        self._kernels, self._sessions = app.kernel_manager, app.session_manager
        key = key_of(os.path.realpath(app.root_dir), app.base_url, str(os.getuid()))
        self._keeping = Keeping(ServerDirectory.take(key), seconds)
        table = getattr(self._sessions, "database_filepath", None)
        if table == _IN_MEMORY and "database_filepath" not in app.config.SessionManager:
            try:
                self._sessions.database_filepath = str(self._keeping.directory.sessions_file)
            except (OSError, TraitError) as error:
                log.warning("jupyter_sing: sessions will not outlive this server: %s", error)
        retention.switch_on(self._kernels, self._keeping)

    async def adopt(self) -> None:
        """Adopt the kernels of the previous server.

        Called once, before the server answers requests: it would forget the sessions of kernels
        that it does not know.
        """
        records, problems = self._keeping.directory.records()
        for problem in problems:
            self._log.warning("jupyter_sing: a kernel is not found again: %s", problem)
        await asyncio.gather(*(self._adopt(record) for record in records))
        if records:
            await self._rename()

    async def _adopt(self, record: KernelRecord) -> None:
        """Adopt one kernel; a failure is logged and does not affect the others."""
        try:
            request = AdoptKernel(record.kernel_id, self._keeping.seconds, MISS_SECONDS)
            kernel = await asyncio.to_thread(client.adopt, request)
        except ControlError as error:
            if error.reason in ("no-daemon", "unknown-kernel"):
                self._keeping.directory.remove(record.kernel_id)
                await self._offer(record)
            else:
                self._not_found(record, str(error))
            return
        except Exception as error:
            self._not_found(record, f"{type(error).__name__}: {error}")
            return
        taken = False
        try:
            taken = await self._start(record, kernel)
        except Exception as error:
            self._not_found(record, f"{type(error).__name__}: {error}")
        finally:
            self._keeping.adopted.pop(record.kernel_id, None)
            if not taken:  # another server may be able to
                kernel.leave()

    async def _start(self, record: KernelRecord, kernel: RemoteKernel) -> bool:
        """Let Jupyter's managers start a kernel, which adopts it; return False if it cannot be."""
        specification = self._kernels.kernel_spec_manager.get_kernel_spec(record.kernel_name)
        chosen = specification.metadata.get("kernel_provisioner", {}).get("provisioner_name")
        usual = KernelProvisionerFactory.instance(parent=self._app).default_provisioner_name
        if (chosen or usual) != PROVISIONER:
            self._not_found(record, f"its provisioner is {chosen or usual} now")
            return False
        self._keeping.adopted[record.kernel_id] = record, kernel
        await self._kernels.start_kernel(
            kernel_id=record.kernel_id, kernel_name=record.kernel_name,
            env=record.environ(os.environ), cwd=record.cwd,
        )  # fmt: skip
        manager = self._kernels.get_kernel(record.kernel_id)
        manager.execution_state = "idle" if not kernel.pid else await self._state(manager)
        if manager.execution_state == "busy":
            # Clients could connect only after the kernel has named its protocol version. A server
            # keeps the reply here; assume what Jupyter assumes after a minute without a reply.
            manager._kernel_info_future = asyncio.Future()
            manager._kernel_info_future.set_result({})
        self._log.info("jupyter_sing: kernel %s was found again", record.kernel_id)
        return True

    async def _state(self, manager: Any) -> str:
        """Return whether a kernel is busy or idle: a busy one does not answer now."""
        answered = asyncio.Event()
        channel = manager.connect_shell()  # a channel of its own: no other replies arrive on it
        try:
            channel.on_recv(lambda _: answered.set())
            manager.session.send(channel, "kernel_info_request")
            async with asyncio.timeout(ANSWER_SECONDS):
                await answered.wait()
        except TimeoutError:
            return "busy"
        finally:
            channel.close()
        return "idle"

    async def _rename(self) -> None:
        """Update the names of notebooks in the environment of kernels that are restarted later."""
        for session in await self._sessions.list_sessions():
            environment = self._sessions.get_kernel_env(session["path"], session["name"])
            kernel_id = session["kernel"]["id"]
            self._kernels.update_env(kernel_id=kernel_id, env=environment)

    async def _offer(self, record: KernelRecord) -> None:
        """Log how to restore the notebook of a kernel that died while it had no server."""
        request = LastCheckpoint(record.session, record.kernel_id, record.notebook)
        text = ""
        if record.session:
            try:
                name = await asyncio.to_thread(last_checkpoint, request, OFFER_SECONDS)
                text = f": %sing restore {name} restores its last checkpoint"
                logger = self._app.event_logger
                event = events.kernel_died(record.session, record.kernel_id, name)
                if logger is not None and events.EVENT_ID in logger.schemas:
                    logger.emit(schema_id=events.EVENT_ID, data=event)
            except Exception as error:
                text = f": {str(error).rstrip('.')}"
        self._log.warning(
            "jupyter_sing: kernel %s died while it had no server%s.", record.kernel_id, text
        )

    def _not_found(self, record: KernelRecord, why: str) -> None:
        self._log.warning(
            "jupyter_sing: kernel %s is not found again: %s", record.kernel_id, why.rstrip(".")
        )

    def leave(self) -> None:
        """Leave the kernels to the next server; called when this server ends."""
        for kernel_id in self._kernels.list_kernel_ids():
            manager = self._kernels.get_kernel(kernel_id)
            provisioner = getattr(manager, "provisioner", None)
            if not isinstance(provisioner, SingProvisioner) or not provisioner.is_kept:
                continue
            manager.stop_restarter()
            self._kernels.stop_watching_activity(kernel_id)
            self._kernels.stop_buffering(kernel_id)
            provisioner.leave()
            self._kernels.remove_kernel(kernel_id)
            # Remaining parts of a manager. Its connection file stays: the kernel's clients use it.
            # Its control socket must be closed: otherwise terminating its context would block.
            manager.connection_file = ""
            manager._close_control_socket()
        self.close()

    async def end(self) -> None:
        """End the kernels; called when this server ends and they must not outlive it."""
        with contextlib.suppress(SingError):
            await self._kernels.shutdown_all()
        self.close()

    def close(self) -> None:
        """Release the server's directory on disk."""
        retention.switch_off(self._kernels)
        self._keeping.directory.close()
