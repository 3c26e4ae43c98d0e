"""Checkpoints of this kernel: passes its notebook to the agent, and restores one.

Runs in the main thread of a kernel, between two cells or in one (standard library, cloudpickle, and
torch if it was imported). Restoring executes code that the checkpoint contains.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from kernelproxy.common.errors import ControlError, StoreError
from kernelproxy.common.ipc import detach
from kernelproxy.common.ipc.agent_client import Control, Show, connect
from kernelproxy.common.protocol import (
    AwaitCheckpoint,
    Carried,
    Checkpoint,
    CheckpointBegun,
    CheckpointOpened,
    CheckpointReply,
    KernelRequest,
    Message,
    OpenCheckpoint,
    Progress,
    RestoreReply,
    TakeOver,
)
from kernelproxy.common.protocol.views import CheckpointView, OmissionView, RestoreView
from kernelproxy.kernel import activation
from kernelproxy.kernel.activation.native_client import NativeClient
from kernelproxy.kernel.files.changed_files import PutBack
from kernelproxy.kernel.files.file_bundle import (
    described,
    gather,
    inherit,
    mapped,
    put_in_place,
    write_all,
)
from kernelproxy.kernel.ipython_state import capture_notebook, restore_notebook
from kernelproxy.kernel.namespace.types import Captured, Omission
from kernelproxy.kernel.restored_process import Restored, drop_requests, step_aside

if TYPE_CHECKING:
    import torch

#: Storing waits for the disk, and for other operations on the session.
SECONDS_MAX = 3600.0
_UNEXPECTED = "The jupyter_sing daemon gave an unexpected answer."


class DeviceCheckpoint:
    """The device's side of a checkpoint, see `DevicePart`.

    Parameters
    ----------
    client : NativeClient
    memory : mmap or None
        File of a checkpoint's device storages.
    storages : dict of int to tuple
        Offset in `memory`, and bytes, of each.
    """

    def __init__(
        self,
        client: NativeClient,
        memory: mmap.mmap | None = None,
        storages: dict[int, tuple[int, int]] | None = None,
    ) -> None:
        self._client, self._memory, self._storages = client, memory, storages or {}

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """See `DevicePart`."""
        return storage.device.type == "cuda"

    def number(self, storage: torch.UntypedStorage) -> int:
        """See `DevicePart`."""
        return self._client.storage_number(storage)

    def read(self, storage: torch.UntypedStorage) -> bytes:
        """See `DevicePart`."""
        import torch

        view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return bytes(view.tolist())

    def load(self, number: int, nbytes: int) -> torch.UntypedStorage:
        """See `DevicePart`."""
        import torch

        offset, saved = self._storages[number]
        view = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        if saved and self._memory is not None:
            host = torch.frombuffer(self._memory, dtype=torch.uint8, count=saved, offset=offset)
            view[:saved].copy_(host)
        view[saved:].zero_()
        return view.untyped_storage()

    def write(self, content: bytes) -> torch.UntypedStorage:
        """See `DevicePart`."""
        import torch

        host = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)
        return host[: len(content)].to("cuda").untyped_storage()

    def rng_states(self) -> list[bytes]:
        """See `DevicePart`."""
        import torch

        return [bytes(torch.cuda.get_rng_state().tolist())]

    def set_rng_states(self, states: Sequence[bytes]) -> None:
        """See `DevicePart`."""
        import torch

        torch.cuda.set_rng_state(torch.frombuffer(bytearray(states[0]), dtype=torch.uint8))


class StartedCheckpoint:
    """Checkpoint whose content is final, and which is being stored.

    Parameters
    ----------
    control : Control
        Takes ownership.
    request : AwaitCheckpoint, optional
        Request for the outcome; without it, the outcome arrives unasked.
    """

    def __init__(self, control: Control, request: AwaitCheckpoint | None = None) -> None:
        self._control, self._request = control, request

    def finish(self, show: Show | None = None) -> CheckpointView:
        """Wait until it is safe on disk, and return its entry as `CheckpointsRequest` lists it.

        Parameters
        ----------
        show : callable, optional
            Called with the bytes done and in total, repeatedly.

        Raises
        ------
        ControlError
            If it could not be stored; then the checkpoint does not exist.
        """
        with self._control as control:
            reply = _outcome_of(control, self._request, show)
        if not isinstance(reply, CheckpointReply):
            raise ControlError(_UNEXPECTED, "failed")
        return reply.checkpoint

    def wait(self) -> None:
        """Wait until it is stored or has failed; the daemon notifies the requester."""
        with contextlib.suppress(ControlError):
            self.finish()


def _outcome_of(control: Control, request: Message | None, show: Show | None) -> Message:
    """Send the request, if there is one, and return the reply that follows all `Progress`."""
    reply = control.more(SECONDS_MAX) if request is None else control.call(request, SECONDS_MAX)
    while isinstance(reply, Progress):
        if show is not None:
            show(reply.done, reply.total)
        reply = control.more(SECONDS_MAX)
    return reply


def begin(
    session: str, shell: Any, name: str, *, automatic: bool = False, form: str = ""
) -> StartedCheckpoint:
    """Capture the notebook; when this returns, the notebook may continue.

    Parameters
    ----------
    session : str
        Id of the session.
    shell : InteractiveShell
    name : str
        Name; "": the daemon chooses one.
    automatic : bool
        True if no user requested it.
    form : str
        See `Checkpoint`.

    Raises
    ------
    ControlError
        If the daemon refuses.
    RuntimeError
        Error of an operator since the last synchronisation.
    Restored
        In a process that was restored from the checkpoint.
    """
    client = activation.current().client
    captured = capture_notebook(shell, DeviceCheckpoint(client) if client is not None else None)
    position = 0
    if client is not None:
        client.synchronize()
        position = client.position()
    fds = [os.memfd_create("sing-host-state", os.MFD_CLOEXEC)]
    try:
        parts = [memoryview(captured.stream), *captured.buffers]
        for part in parts:
            write_all(fds[0], part.cast("B"))
        files_fd, states, left_out = gather()
        fds.append(files_fd)
        host = _described(captured, left_out, position, [part.nbytes for part in parts])
        host["files"] = described(states)
        returns = detach.current.returns
        control = connect(start=False)
        try:
            request = Checkpoint(session, name, automatic, host, form)
            reply, _ = control.call_with_fds(request, SECONDS_MAX, fds)
        except BaseException:
            control.close()
            raise
    finally:
        for fd in fds:
            os.close(fd)
    if isinstance(reply, CheckpointBegun) and not reply.leaves:
        return StartedCheckpoint(control)
    # This descriptor would be open in the images too, but lead nowhere.
    control.close()
    if not isinstance(reply, CheckpointBegun):
        raise ControlError(_UNEXPECTED, "failed")
    name = reply.name or name
    back = detach.current.wait(returns, SECONDS_MAX)
    if back.restored:
        inherit(states)
        raise Restored(name)
    if back.problem:
        raise ControlError(back.problem, "no-daemon")
    return StartedCheckpoint(connect(start=False), AwaitCheckpoint(session, name))


def _described(
    captured: Captured, left_out: Sequence[Omission], position: int, sizes: list[int]
) -> dict[str, Any]:
    """Describe a host state for the agent, see `kernelproxy.agent.checkpoint.parts.HostState`."""
    return {
        "position": position,
        "parts": sizes,
        "storages": [list(each) for each in captured.storages.items()],
        "about": {
            "saved": [asdict(item) for item in captured.saved],
            "omitted": [asdict(omission) for omission in captured.omitted],
            "left_out": [asdict(omission) for omission in left_out],
        },
    }


def take_out(shell: Any, name: str, form: str = "", show: Show | None = None) -> RestoreView:
    """Replace this notebook by the notebook of a checkpoint.

    Parameters
    ----------
    shell : InteractiveShell
    name : str
    form : str
        See `OpenCheckpoint`. If the process is restored, this one executes nothing more.
    show : callable, optional
        Called with the bytes read and in total, repeatedly.

    Returns
    -------
    dict
        What was restored, see `RestoreReply`.

    Raises
    ------
    ControlError
        If it cannot be read; then nothing has changed. If another version wrote its namespace,
        the files are restored and the variables unchanged.
    """
    session = activation.current().session
    with _opened(OpenCheckpoint(name, session, form), show) as (reply, fds):
        if reply.form != "process":
            return {**_take_out(shell, reply, fds), "form": "namespace", "why": reply.why}
        files = _put_in_place(reply, fds)
        try:
            _let_take_over(session, reply.checkpoint["name"], show)
        except ControlError as error:
            if form == "process":
                raise
            why = error.message
        else:
            step_aside(shell)
            return {**_outcome(reply, len(reply.checkpoint["saved"]), [], files), "form": "process"}
    with _opened(OpenCheckpoint(name, session, "namespace"), show) as (reply, fds):
        return {**_take_out(shell, reply, fds, files), "form": "namespace", "why": why}


@contextlib.contextmanager
def _opened(
    request: OpenCheckpoint, show: Show | None
) -> Iterator[tuple[CheckpointOpened, list[int]]]:
    with connect(start=False) as control:
        reply, fds = control.last(request, SECONDS_MAX, show)
    try:
        if not isinstance(reply, CheckpointOpened) or len(fds) != 3:
            raise ControlError(_UNEXPECTED, "failed")
        yield reply, fds
    finally:
        for fd in fds:
            os.close(fd)


def _let_take_over(session: str, name: str, show: Show | None) -> None:
    """Have the process of a checkpoint restored; it replaces this one."""
    with connect(start=False) as control:
        reply, _ = control.last(TakeOver(session, name), SECONDS_MAX, show)
    if not isinstance(reply, RestoreReply):
        raise ControlError(_UNEXPECTED, "failed")


def _put_in_place(reply: CheckpointOpened, fds: Sequence[int]) -> PutBack:
    return put_in_place(reply.checkpoint["name"], reply.files, fds[2])


def _take_out(
    shell: Any, reply: CheckpointOpened, fds: Sequence[int], files: PutBack | None = None
) -> RestoreView:
    """Restore the namespace, and the files unless they are restored already."""
    host, device_memory = (mapped(fd) for fd in fds[:2])
    whole = memoryview(host) if host is not None else memoryview(b"")
    ends = itertools.accumulate(reply.parts)
    parts = [whole[end - count : end] for end, count in zip(ends, reply.parts, strict=True)]
    client = activation.current().client
    if client is None and (reply.storages or reply.checkpoint["torch"]):
        with contextlib.suppress(ImportError):
            import torch  # noqa: F401 (joins the session, as no cell has done it yet)
        client = activation.current().client
        # Without storages there may still be small tensors; without a device they are reported.
        if client is None and reply.storages:
            raise ControlError(
                f"The checkpoint holds tensors of {reply.checkpoint['device']}, and this kernel "
                "has no device.",
                "unavailable",
            )
    device = None
    if client is not None:
        storages = {number: (offset, count) for number, offset, count in reply.storages}
        device = DeviceCheckpoint(client, device_memory, storages)
    if files is None:
        files = _put_in_place(reply, fds)  # first: variables may be open files of these
    try:
        restored = restore_notebook(shell, bytes(parts[0]), parts[1:], device)
    except StoreError as error:
        raise ControlError(str(error), error.reason) from error
    if client is not None:
        client.synchronize()
    problems = [*_only_in_process(reply), *restored.problems]
    return _outcome(reply, len(restored.namespace), problems, files)


def _only_in_process(reply: CheckpointOpened) -> list[Omission]:
    """Return what can be restored only with the process of a checkpoint."""
    return [
        Omission(
            str(each["name"]), f"{each['why']} (only its process has it)", bool(each["partly"])
        )
        for each in reply.checkpoint["only_process"]
    ]


def _outcome(
    reply: CheckpointOpened, variables: int, problems: Sequence[Omission], files: PutBack
) -> RestoreView:
    problems = [*problems, *(Omission(str(f.path), f.why) for f in files.problems)]
    return {
        "checkpoint": reply.checkpoint["name"],
        "variables": variables,
        "files": len(files.restored),
        "aside": {str(path): str(where) for path, where in files.kept_aside.items()},
        "problems": [cast("OmissionView", asdict(each)) for each in problems],
    }


def carry_out(request: KernelRequest, shell: Any, session: str) -> None:
    """Carry out a request of the daemon, and report the outcome."""
    report = Carried(session, request.verb, request.name)
    try:
        if request.verb == "restore":
            outcome = take_out(shell, request.name, request.form)
            report = Carried(session, request.verb, request.name, outcome={**outcome})
        else:
            started = begin(
                session, shell, request.name, automatic=request.automatic, form=request.form
            )
            # The notebook continues while it is stored.
            threading.Thread(
                target=started.wait, name="jupyter_sing checkpoint", daemon=True
            ).start()
    except Restored:
        drop_requests(shell)  # requests to the saved notebook
        return
    except ControlError as error:
        report = Carried(session, request.verb, request.name, error.message)
    except (Exception, KeyboardInterrupt) as error:  # the caller waits for a report
        report = Carried(session, request.verb, request.name, f"{type(error).__name__}: {error}")
    with contextlib.suppress(ControlError), connect(start=False) as control:
        control.call(report, SECONDS_MAX)
