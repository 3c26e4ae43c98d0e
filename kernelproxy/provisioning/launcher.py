"""Launcher of a kernel in this process, in the kernel host, or in a sandbox.

The kernel host owns the kernel if the server keeps its kernels; a process manager owns the kernel's
process if that can be saved. Both, one or none of these may apply. For the kernel manager there is
no difference.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jupyter_client.connect import LocalPortCache
from jupyter_client.launcher import launch_kernel
from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase

from kernelproxy.common.errors import ControlError, NativeError, ProcessError
from kernelproxy.criu.sandbox import Form
from kernelproxy.kernel_host import retention
from kernelproxy.kernel_host.client import RemoteKernel
from kernelproxy.kernel_host.hosted_kernel import HostedKernel
from kernelproxy.kernel_host.process_manager import ProcessManager
from kernelproxy.kernel_host.server_records import KernelRecord, changes
from kernelproxy.provisioning.ports import ReservedPorts

#: Reasons why the kernel host cannot start any kernel, in a sandbox or not.
_NO_KERNEL_HOST = ("no-daemon", "timeout", "broken", "unavailable")

T = TypeVar("T")


class KeptKernel(LocalProvisioner):
    """Provisioner that starts a kernel in the right place, or takes over one that runs there."""

    #: Id of the kernel's session, or "".
    session: str = ""
    #: Path of its notebook, or "".
    notebook: str = ""
    #: How its process can be saved; None: it cannot.
    form: Form | None = None
    _kernel: HostedKernel | None = None  # owned by a process manager, or by the kernel host
    _adopted = False  # it runs already
    _wanted: dict[str, str] | None = None  # the environment, as it was requested

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._ports = ReservedPorts()

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Called by the kernel manager before each launch: reserve the kernel's ports."""
        manager = self.parent
        # Without a port, a manager wants new ones: those before were taken.
        if manager and manager.cache_ports and not (self.ports_cached and manager.shell_port):
            try:
                self._ports.reserve(manager)
                self.ports_cached = True
            except OSError as error:
                self.log.warning(
                    "jupyter_sing: the ports of kernel %s are not reserved: %s",
                    self.kernel_id, error,
                )  # fmt: skip
        return await super().pre_launch(**kwargs)

    async def cleanup(self, restart: bool = False) -> None:
        """Called by the kernel manager when the kernel has ended; `restart`: a launch follows."""
        if not restart:
            self._ports.release()
        await super().cleanup(restart=restart)

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> Any:
        """Called by the kernel manager to start the kernel, in a sandbox if there is a form."""
        if self._adopted:
            self._adopted = False
            return self.connection_info
        if self.form is not None:
            try:
                return await self._launch_managed(self.form, cmd, kwargs)
            except (ProcessError, NativeError, ControlError, OSError) as error:
                reason = str(error).rstrip(".")
            except Exception as error:
                reason = f"internal error: {type(error).__name__}: {error}"
            kwargs["env"]["SING_PROCESS_REASON"] = reason
            self.log.warning(
                "jupyter_sing: the process of kernel %s cannot be saved: %s", self.kernel_id, reason
            )
        try:
            if await self._launch_kept(None, cmd, kwargs):
                return self.connection_info
        except Exception as error:
            self._not_kept(f"internal error: {type(error).__name__}: {error}")
        return await super().launch_kernel(cmd, **kwargs)

    async def _launch_kept(self, form: Form | None, cmd: list[str], kwargs: dict[str, Any]) -> bool:
        """Start the kernel in the kernel host; return False if it is not kept, or that failed.

        Raises
        ------
        ControlError, OSError
            With a form: it does not start in a sandbox.
        """
        kept = retention.of(self.parent)
        if kept is None or self.parent is None:
            return False
        info = {
            key: each.decode() if isinstance(each, bytes) else each
            for key, each in self.connection_info.items()
        }
        record = KernelRecord(
            self.kernel_id or "", self.parent.kernel_name, self.session, self.notebook, info,
            str(kwargs.get("cwd") or Path.cwd()), changes(self._wanted or os.environ, os.environ),
        )  # fmt: skip
        file = os.path.realpath(self.parent.connection_file)
        try:
            self._has(await in_thread(lambda: kept.start(record, cmd, file, kwargs, form)))
        except (ControlError, OSError) as error:
            kept.directory.remove(record.kernel_id)
            reason = getattr(error, "reason", "failed")
            if form is not None and reason not in _NO_KERNEL_HOST:
                raise
            self._not_kept(str(error).rstrip("."))
            return False
        self.cwd = record.cwd
        return True

    def _not_kept(self, why: str) -> None:
        self.log.warning(
            "jupyter_sing: kernel %s will end with this server: %s", self.kernel_id, why
        )

    def _has(self, kernel: HostedKernel) -> None:
        """Use a kernel that the kernel host or a process manager owns."""
        self._kernel, self.process = kernel, kernel  # type: ignore[assignment]
        self.pid = self.pgid = kernel.pid

    async def take_over(self, kwargs: dict[str, Any]) -> bool:
        """Take over a running kernel instead of preparing a new one, if this start is for one.

        Parameters
        ----------
        kwargs : dict
            The launch parameters; completed if a kernel is taken over.

        Returns
        -------
        bool
            True if a kernel was taken over.
        """
        self._wanted = kwargs.get("env")
        manager, kept = self.parent, retention.of(self.parent)
        found = None if kept is None else kept.adopted.pop(self.kernel_id or "", None)
        if found is None or manager is None:
            return False
        record, kernel = found
        self._adopted = True
        self._has(kernel)
        self.session, self.notebook, self.cwd = kernel.session, record.notebook, record.cwd
        # First, because the file that its first server wrote contains these ports and this key.
        manager.load_connection_info(record.connection)
        name = (self._wanted or {}).get("JPY_SESSION_NAME", "")
        manager.write_connection_file(jupyter_session=name)
        self.connection_info = manager.get_connection_info()
        if manager.cache_ports:  # or a restart would choose other ports
            LocalPortCache.instance().currently_used_ports.update(manager.ports)
            self.ports_cached = True
        kwargs.pop("transport_encryption", None)
        kwargs.update(await KernelProvisionerBase.pre_launch(self, cmd=[], **kwargs))
        return True

    async def _launch_managed(self, form: Form, cmd: list[str], kwargs: dict[str, Any]) -> Any:
        """Start the kernel in a sandbox, behind a ZMQ proxy.

        Raises
        ------
        ProcessError, NativeError, ControlError, OSError
            If that fails; then nothing is left of it.
        """
        if await self._launch_kept(form, cmd, kwargs):
            return self.connection_info
        manager = self.parent
        assert manager is not None, "pre_launch has made a session for its kernel"
        file = os.path.realpath(manager.connection_file)
        process_manager = await in_thread(
            lambda: ProcessManager(form, self.session, self.connection_info, os.path.basename(file))
        )
        command = [text.replace(file, process_manager.connection_file) for text in cmd]
        # Its parent is not the server but process 1 of the sandbox, which ends with the server.
        # Without a parent, the kernel would behave as if it was started in a terminal.
        env = {**kwargs["env"], "JPY_PARENT_PID": "1"}
        rest = self._scrub_kwargs({**kwargs, "env": env, "independent": True})
        passed = rest.pop("pass_fds", ())
        outlets = (rest.get("stdout"), rest.get("stderr"))

        def launch(sandboxed: list[str], fds: list[int]) -> subprocess.Popen[bytes]:
            process: subprocess.Popen[bytes]
            process = launch_kernel(sandboxed, **rest, pass_fds=(*passed, *fds))
            return process

        process = await in_thread(lambda: process_manager.start(command, launch, outlets))
        self._has(process_manager)
        self.process = process
        self.cwd = kwargs.get("cwd", Path.cwd())
        return self.connection_info

    @property
    def is_kept(self) -> bool:
        """True if the kernel continues when its server leaves it."""
        return isinstance(self._kernel, RemoteKernel) and self._kernel.poll() is None

    def leave(self) -> None:
        """Called when the server ends: a kept kernel continues, for the next server."""
        if isinstance(self._kernel, RemoteKernel):
            self._kernel.leave()
            self._kernel = self.process = None

    def forget(self) -> None:
        """Called when the kernel has ended for good: remove its record for other servers."""
        if (kept := retention.of(self.parent)) is not None:
            kept.directory.remove(self.kernel_id or "")

    async def close(self) -> None:
        """End the kernel, if the kernel host or a process manager owns it."""
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            await in_thread(kernel.close)
            self.session = kernel.session  # it may have been replaced

    @property
    def has_process(self) -> bool:
        """True if the kernel was started and its end was not awaited; it may hibernate."""
        return self.process is not None

    async def poll(self) -> int | None:
        """Return the kernel's exit code; None if it runs, or hibernates."""
        if self._kernel is None or self.process is None:
            return await super().poll()
        return self._kernel.poll()

    async def wait(self) -> int | None:
        """Wait until the kernel has ended; return its exit code."""
        if self._kernel is None or self.process is None:
            return await super().wait()
        while (code := await self.poll()) is None:
            await asyncio.sleep(0.1)
        self.process = None
        return code

    async def send_signal(self, signum: int) -> None:
        """Send a signal to the kernel and to the processes that it has started."""
        if self._kernel is None or self.process is None:
            await super().send_signal(signum)
        else:
            self._kernel.signal(signum)

    async def get_provisioner_info(self) -> dict[str, Any]:
        """Return the kernel's description for other programs."""
        if isinstance(kernel := self._kernel, RemoteKernel):
            await in_thread(kernel.refresh)
        if kernel is not None:
            self.pid = self.pgid = kernel.pid
            self.session = kernel.session
        found: dict[str, Any] = await super().get_provisioner_info()
        return {**found, "session": self.session}

    async def load_provisioner_info(self, provisioner_info: dict[str, Any]) -> None:
        """Restore the state that `get_provisioner_info` returned."""
        await super().load_provisioner_info(provisioner_info)
        self.session = str(provisioner_info.get("session", ""))


async def in_thread(function: Callable[[], T]) -> T:
    """Run a blocking function in a thread, so that it does not block the server's event loop."""
    return await asyncio.get_running_loop().run_in_executor(None, function)
