"""A restarted server finds its kernels again, and one that ends leaves them.

What a server keeps is in `kernelproxy.kernel_host`. Here is what Jupyter's own managers must be
told: that a kernel runs already under its old id, in which state it is, and, when the server ends,
that they have it no more. Sessions (which notebook has which kernel) are kept in Jupyter's own
table, in
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
from kernelproxy.kernel_host.server_records import Record, ServerDirectory, key_of
from kernelproxy.provisioning import events
from kernelproxy.provisioning.provisioner import SingProvisioner, last_checkpoint

#: An idle kernel answers sooner; one that does not is taken for busy.
ANSWER_SECONDS = 2.0
OFFER_SECONDS = 20.0
#: In which a server that has just died is missed, on a loaded machine.
MISS_SECONDS = 20.0
#: Where Jupyter's sessions are if nobody has said anything.
_IN_MEMORY = ":memory:"


class Reattachment:
    """What a server application does for kernels that outlive it; switched on by its making.

    Parameters
    ----------
    app : jupyter_server.serverapp.ServerApp
    seconds : float
        For how long kernels live without a server.
    log : logging.Logger

    Raises
    ------
    SingError, OSError
        If nothing can be kept.
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
        """Called once, before the server answers anybody: it would forget the sessions of kernels
        that it does not know.
        """
        records, problems = self._keeping.directory.records()
        for problem in problems:
            self._log.warning("jupyter_sing: a kernel is not found again: %s", problem)
        await asyncio.gather(*(self._adopt(record) for record in records))
        if records:
            await self._rename()

    async def _adopt(self, record: Record) -> None:
        """Take over one kernel; whatever fails is said and harms nobody else."""
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
            if not taken:  # there may be a server that can
                kernel.leave()

    async def _start(self, record: Record, kernel: RemoteKernel) -> bool:
        """Have Jupyter's managers start it, which they do by taking it over; false: they do not."""
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
            # Clients could only connect when it has said which protocol it speaks. A server that
            # knows has it here; assume what Jupyter assumes after a minute without an answer.
            manager._kernel_info_future = asyncio.Future()
            manager._kernel_info_future.set_result({})
        self._log.info("jupyter_sing: kernel %s was found again", record.kernel_id)
        return True

    async def _state(self, manager: Any) -> str:
        """Say whether a kernel executes something: then it does not answer now."""
        answered = asyncio.Event()
        channel = manager.connect_shell()  # its own, on which nothing else is answered
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
        """Tell kernels that are restarted later what their notebooks are called by now."""
        for session in await self._sessions.list_sessions():
            environment = self._sessions.get_kernel_env(session["path"], session["name"])
            kernel_id = session["kernel"]["id"]
            self._kernels.update_env(kernel_id=kernel_id, env=environment)

    async def _offer(self, record: Record) -> None:
        """Say what gives the notebook back of a kernel that died while it had no server."""
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

    def _not_found(self, record: Record, why: str) -> None:
        self._log.warning(
            "jupyter_sing: kernel %s is not found again: %s", record.kernel_id, why.rstrip(".")
        )

    def leave(self) -> None:
        """Called when the server ends: leave its kernels to the next one."""
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
            # What else goes with a manager: its file, which the kernel's clients know, stays; and
            # with its socket, the end of the context that it is of would wait for ever.
            manager.connection_file = ""
            manager._close_control_socket()
        self.close()

    async def end(self) -> None:
        """Called when the server ends: end its kernels with it."""
        with contextlib.suppress(SingError):
            await self._kernels.shutdown_all()
        self.close()

    def close(self) -> None:
        """Give up what the server has on disk."""
        retention.switch_off(self._kernels)
        self._keeping.directory.close()
