"""A kernel that somebody else than its manager's process may have in hand.

The attendant has it if the server keeps its kernels, and a tender if its process can be saved:
both, one or none of that. A kernel manager sees a kernel of its own, as ever.
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
from kernelproxy.kernel_host.hosted_kernel import Kernel
from kernelproxy.kernel_host.process_manager import Tender
from kernelproxy.kernel_host.server_records import Record, changes

#: Reasons why the attendant does not start a kernel at all, in a sandbox or not.
_NO_ATTENDANT = ("no-daemon", "timeout", "broken", "unavailable")

T = TypeVar("T")


class KeptKernel(LocalProvisioner):
    """Starts a kernel where it is to be, or takes one over that runs there."""

    #: Id of the kernel's session, or "".
    session: str = ""
    #: Path of its notebook, or "".
    notebook: str = ""
    #: How its process can be saved; None: it cannot.
    form: Form | None = None
    _kernel: Kernel | None = None  # a tender's, or the attendant's
    _adopted = False  # it runs already
    _wanted: dict[str, str] | None = None  # the environment, as it was asked for

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> Any:
        """Called by the kernel manager to start the kernel, in a sandbox if there is a form."""
        if self._adopted:
            self._adopted = False
            return self.connection_info
        if self.form is not None:
            try:
                return await self._launch_tended(self.form, cmd, kwargs)
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
        """Start the kernel at the attendant; false if it is not to be there, or cannot.

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
        record = Record(
            self.kernel_id or "", self.parent.kernel_name, self.session, self.notebook, info,
            str(kwargs.get("cwd") or Path.cwd()), changes(self._wanted or os.environ, os.environ),
        )  # fmt: skip
        file = os.path.realpath(self.parent.connection_file)
        try:
            self._has(await in_thread(lambda: kept.start(record, cmd, file, kwargs, form)))
        except (ControlError, OSError) as error:
            kept.directory.remove(record.kernel_id)
            reason = getattr(error, "reason", "failed")
            if form is not None and reason not in _NO_ATTENDANT:
                raise
            self._not_kept(str(error).rstrip("."))
            return False
        self.cwd = record.cwd
        return True

    def _not_kept(self, why: str) -> None:
        self.log.warning(
            "jupyter_sing: kernel %s will end with this server: %s", self.kernel_id, why
        )

    def _has(self, kernel: Kernel) -> None:
        """Take a kernel that somebody else has in hand for ours."""
        self._kernel, self.process = kernel, kernel  # type: ignore[assignment]
        self.pid = self.pgid = kernel.pid

    async def take_over(self, kwargs: dict[str, Any]) -> bool:
        """Take over a kernel that runs, if this start is to do so, in place of preparing another.

        Parameters
        ----------
        kwargs : dict
            The launch parameters; completed if it is taken over.
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
        # First, as the file that its first server has written names these ports, and this key.
        manager.load_connection_info(record.connection)
        name = (self._wanted or {}).get("JPY_SESSION_NAME", "")
        manager.write_connection_file(jupyter_session=name)
        self.connection_info = manager.get_connection_info()
        if manager.cache_ports:  # or a restart would choose others
            LocalPortCache.instance().currently_used_ports.update(manager.ports)
            self.ports_cached = True
        kwargs.pop("transport_encryption", None)
        kwargs.update(await KernelProvisionerBase.pre_launch(self, cmd=[], **kwargs))
        return True

    async def _launch_tended(self, form: Form, cmd: list[str], kwargs: dict[str, Any]) -> Any:
        """Start the kernel in a sandbox, behind a switchboard.

        Raises
        ------
        ProcessError, NativeError, ControlError, OSError
            If that cannot be; nothing is left of it then.
        """
        if await self._launch_kept(form, cmd, kwargs):
            return self.connection_info
        manager = self.parent
        assert manager is not None, "pre_launch has made a session for its kernel"
        file = os.path.realpath(manager.connection_file)
        tender = await in_thread(
            lambda: Tender(form, self.session, self.connection_info, os.path.basename(file))
        )
        command = [text.replace(file, tender.connection_file) for text in cmd]
        # Not the server is its parent, but process 1 of the sandbox, which ends with the server;
        # without a parent it would take itself for one that was started in a terminal.
        env = {**kwargs["env"], "JPY_PARENT_PID": "1"}
        rest = self._scrub_kwargs({**kwargs, "env": env, "independent": True})
        passed = rest.pop("pass_fds", ())
        outlets = (rest.get("stdout"), rest.get("stderr"))

        def launch(sandboxed: list[str], fds: list[int]) -> subprocess.Popen[bytes]:
            process: subprocess.Popen[bytes]
            process = launch_kernel(sandboxed, **rest, pass_fds=(*passed, *fds))
            return process

        process = await in_thread(lambda: tender.start(command, launch, outlets))
        self._has(tender)
        self.process = process
        self.cwd = kwargs.get("cwd", Path.cwd())
        return self.connection_info

    @property
    def is_kept(self) -> bool:
        """Whether the kernel lives on when its server leaves it."""
        return isinstance(self._kernel, RemoteKernel) and self._kernel.poll() is None

    def leave(self) -> None:
        """Called when the server ends: let a kernel that is kept live on, for the next one."""
        if isinstance(self._kernel, RemoteKernel):
            self._kernel.leave()
            self._kernel = self.process = None

    def forget(self) -> None:
        """Called when the kernel has ended for good: no server is to look for it."""
        if (kept := retention.of(self.parent)) is not None:
            kept.directory.remove(self.kernel_id or "")

    async def close(self) -> None:
        """End the kernel, if somebody else has it in hand."""
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            await in_thread(kernel.close)
            self.session = kernel.session  # it may have been replaced

    @property
    def has_process(self) -> bool:
        """Whether the kernel was started and not waited for; it may hibernate."""
        return self.process is not None

    async def poll(self) -> int | None:
        """Return how the kernel has ended; None if it runs, or hibernates."""
        if self._kernel is None or self.process is None:
            return await super().poll()
        return self._kernel.poll()

    async def wait(self) -> int | None:
        """Wait for the kernel's end."""
        if self._kernel is None or self.process is None:
            return await super().wait()
        while (code := await self.poll()) is None:
            await asyncio.sleep(0.1)
        self.process = None
        return code

    async def send_signal(self, signum: int) -> None:
        """Send a signal to the kernel and to what it has started."""
        if self._kernel is None or self.process is None:
            await super().send_signal(signum)
        else:
            self._kernel.signal(signum)

    async def get_provisioner_info(self) -> dict[str, Any]:
        """Return what is to be known of the kernel by who looks at it from outside."""
        if isinstance(kernel := self._kernel, RemoteKernel):
            await in_thread(kernel.refresh)
        if kernel is not None:
            self.pid = self.pgid = kernel.pid
            self.session = kernel.session
        found: dict[str, Any] = await super().get_provisioner_info()
        return {**found, "session": self.session}

    async def load_provisioner_info(self, provisioner_info: dict[str, Any]) -> None:
        """Take over what `get_provisioner_info` has returned."""
        await super().load_provisioner_info(provisioner_info)
        self.session = str(provisioner_info.get("session", ""))


async def in_thread(function: Callable[[], T]) -> T:
    """Run what blocks beside the event loop, on which every other kernel depends."""
    return await asyncio.get_running_loop().run_in_executor(None, function)
