"""Joining a session: at the import of torch, or in a child when it first uses the device.

A kernel joins the session that was opened for it. A process that a kernel or a program has started
or forked opens one of its own, and only when it uses the device: most such processes never do, and
a session would show in every list (Note [Opening] in native/client/log/session.h).
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kernelproxy.common import paths
from kernelproxy.common.errors import NativeError, SingError
from kernelproxy.common.ipc.agent_client import connect
from kernelproxy.common.protocol import Attach, Attached
from kernelproxy.kernel.activation import child_session, compile_progress, state
from kernelproxy.kernel.activation.agent_connection import Link
from kernelproxy.kernel.activation.jobs import job_report
from kernelproxy.kernel.activation.native_client import NativeClient
from kernelproxy.native import build

#: The daemon answers when a zygote has imported torch, which is slow on an overloaded machine. The
#: zygote may have to compile first, even by itself, if its cache is not the kernel's. A kernel that
#: gave up earlier would never have a device.
ATTACH_SECONDS_MAX = 1800.0


class SessionJoin:
    """Joins sessions with the native client for one torch.

    Parameters
    ----------
    torch : TorchInfo
    path : Path
        The client's library.
    """

    def __init__(self, torch: build.TorchInfo, path: Path) -> None:
        self._torch, self._path = torch, path

    @functools.cached_property
    def client(self) -> NativeClient:
        """The client, which is loaded for this.

        Raises
        ------
        NativeError
            If it cannot be loaded.
        """
        return NativeClient.load(self._path, self._torch.directory)

    def join(self, session: str) -> None:
        """Join a session.

        Raises
        ------
        SingError
            If the daemon refuses.
        """
        attach, path = Attach(session, self._torch.version), paths.socket_path()
        control = connect(start=False, path=path)
        try:
            reply, fds = control.call_with_fds(attach, ATTACH_SECONDS_MAX)
            try:
                if not isinstance(reply, Attached) or len(fds) != 4:
                    raise NativeError("the daemon gave an unexpected answer")
                bell = control.detach().detach()
                self.client.connect(fds, bell)
            finally:
                _close(fds)
        finally:
            control.close()
        link = Link(bell, attach, path, self._end, self.client)
        os.register_at_fork(after_in_child=link.disown)
        state.current().link = link
        link.start()

    def _end(self) -> None:
        """Let nothing of this process wait for a device that is gone."""
        self.client.give_up()
        if endpoint := sys.modules.get("kernelproxy.kernel.collectives.transport.endpoint"):
            endpoint.end_session()

    def open(self) -> None:
        """Open a session for this process and join it; called by the native client.

        Raises
        ------
        RuntimeError
            If that is not possible.
        """
        here = state.current()
        try:
            session = child_session.open_session(here.session)
            self.join(session)
        except (SingError, OSError) as error:
            raise RuntimeError(
                f"CUDA error: this process got no device session: {str(error).rstrip('.')}."
            ) from error
        here.session = os.environ["SING_SESSION"] = session
        os.environ[state.CLIENT_VARIABLE] = str(os.getpid())
        state.joined(self.client)
        if not here.cells:
            state.cell(1)  # the whole process is one: see `run_script`
        job_report.send()


def prepare(torch: build.TorchInfo) -> SessionJoin:
    """Find the native client for a torch, or compile it.

    Raises
    ------
    SingError
        If there is none for this torch.
    """
    with compile_progress.Shown() as shown:
        return SessionJoin(torch, build.ensure(torch, shown).client)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
