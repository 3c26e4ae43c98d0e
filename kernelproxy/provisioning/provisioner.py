"""The kernel provisioner ``sing``: a local kernel, with a device session if possible.

It never prevents a kernel from starting. If something fails here, the kernel starts as an ordinary
one. The reason goes to the server's log, and to the kernel, which shows it where it matters: when
torch is imported and in ``%sing status``.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from kernelproxy import headless
from kernelproxy.common import options, paths
from kernelproxy.common.errors import ControlError, NativeError
from kernelproxy.common.ipc.agent_client import connect
from kernelproxy.common.protocol import (
    CheckpointReply,
    CloseSession,
    LastCheckpoint,
    Message,
    OpenSession,
    OpenSessionReply,
    Prepare,
)
from kernelproxy.common.readable import escaped
from kernelproxy.criu.sandbox import Form
from kernelproxy.kernel import gpu_access
from kernelproxy.kernel.activation.child_session import (
    DEVICE_VARIABLE,
    LAUNCHER_VARIABLE,
    NAME_VARIABLE,
)
from kernelproxy.kernel.files import tracker
from kernelproxy.native import build, libraries, tools
from kernelproxy.provisioning import events
from kernelproxy.provisioning.launcher import KeptKernel, in_thread
from kernelproxy.provisioning.traits import trait

EXTENSION = "kernelproxy.kernel.ipython_extension"
#: Entry points: modules with a `load_ipython_extension`.
EXTENSIONS = "kernelproxy.ipython_extensions"
# Our packages need this to be imported; torch 2.11 also supports older versions.
PYTHON_MIN = (3, 11)
#: Maximum length of a session's name, which may come from any source.
NAME_CHARACTERS_MAX = 200
#: For torch's TCPStore, whose other implementation uses io_uring: then the process cannot be saved.
WITHOUT_IO_URING = "USE_LIBUV", "0"

# Environment variables that are set for a kernel.
_VARIABLES = (
    "SING_SESSION", "SING_SOCKET", "SING_REASON", "SING_PROCESS_REASON", "SING_CLIENT",
    "SING_BUNDLE", "SING_EXTENSIONS", LAUNCHER_VARIABLE, NAME_VARIABLE, DEVICE_VARIABLE,
)  # fmt: skip
# Torch of each interpreter, by its path and modification time: to find it out takes a process.
_torch_of: dict[tuple[str, float], build.TorchInfo | NativeError] = {}
# Interpreters (by the same key) and tracker libraries that were seen to start together.
_trackable: set[tuple[str, float, Path]] = set()


class SingProvisioner(KeptKernel):
    """Provisioner that starts a kernel locally and opens a device session for it."""

    idle_timeout: float | None = trait(options.IDLE_TIMEOUT, given=True)
    device: str = trait(options.DEVICE)
    open_timeout: float = trait(options.OPEN_TIMEOUT)
    track_files: bool = trait(options.TRACK_FILES)
    checkpoint_every: float = trait(options.CHECKPOINT_EVERY)
    checkpoint_cells: int = trait(options.CHECKPOINT_CELLS)
    checkpoint_keep: int = trait(options.CHECKPOINT_KEEP)
    save_process: bool = trait(options.SAVE_PROCESS)
    direct_gpu: bool = trait(options.DIRECT_GPU)
    hibernate_timeout: float = trait(options.HIBERNATE_TIMEOUT)

    _no_process: str = ""  # why its process cannot be saved
    _ending = False  # the kernel manager has requested the kernel's end
    _died = False  # it ended without such a request
    _owed = False  # and its last checkpoint is not announced yet

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Called by the kernel manager before each launch, also at a restart.

        Returns
        -------
        dict
            The launch parameters, with a session's variables if there is one.
        """
        if await self.take_over(kwargs):
            return kwargs
        kwargs = await super().pre_launch(**kwargs)
        try:
            await self._close()  # a restart ends the old session, as its variables are gone
            owed, self._died, self._ending, self._owed = self._owed, False, False, False
            await self._propose(kwargs)
            if owed and self.session:
                await self._offer(LastCheckpoint(self.session))
        except ControlError as error:
            self._decline(str(error).rstrip("."))
        except Exception as error:
            self._decline(f"internal error: {type(error).__name__}: {error}")
        return kwargs

    async def poll(self) -> int | None:
        """Return the kernel's exit code; None if it runs, or hibernates."""
        status = await super().poll()
        if status and not self._ending and not self._died:
            self._died = self._owed = True
            session = self.session if self._kernel is None else self._kernel.session
            if session:
                kernel_id = self.kernel_id or ""
                await self._offer(LastCheckpoint(session, kernel_id, self.notebook))
        return status

    async def shutdown_requested(self, restart: bool = False) -> None:
        """Called by the kernel manager when it has asked the kernel to end."""
        await self._end_is_wanted()
        if self._kernel is not None:
            self._kernel.shut_down()

    async def terminate(self, restart: bool = False) -> None:
        """Called by the kernel manager to end the kernel."""
        await self._end_is_wanted()
        await super().terminate(restart=restart)

    async def kill(self, restart: bool = False) -> None:
        """Called by the kernel manager to end the kernel at once, also if it has ended."""
        await self._end_is_wanted()
        await super().kill(restart=restart)

    async def _end_is_wanted(self) -> None:
        self._ending |= await self.poll() is None

    async def cleanup(self, restart: bool = False) -> None:
        """Called by the kernel manager when the kernel has ended; `restart`: a launch follows."""
        try:
            await self._close()
            if not restart:
                # Not at a restart: files that the notebook wrote before it still belong to it.
                with contextlib.suppress(OSError):
                    paths.journal_path(self.kernel_id or "").unlink()
                self.forget()
        finally:
            await super().cleanup(restart=restart)

    async def _propose(self, kwargs: dict[str, Any]) -> None:
        """Add a session to the launch parameters, or leave the kernel an ordinary one."""
        command: list[str] = kwargs["cmd"]
        env: dict[str, str] = kwargs.setdefault("env", os.environ.copy())
        for name in _VARIABLES:
            env.pop(name, None)  # if this server was started in a kernel
        self.form, self._no_process = None, ""
        tracker.leave(env)
        gpu_access.restore(env)
        python = ipykernel_interpreter(self.kernel_spec.language, command, env)
        if python is None:
            return
        try:
            info = await self._torch(python, env)
        except NativeError as error:
            self._decline(str(error))
            return
        reason = ""
        if _python_version(info.python_tag) < PYTHON_MIN:
            self._decline(f"{python} is older than Python {'.'.join(map(str, PYTHON_MIN))}")
            return
        try:
            build.check_version(info)
            notebook = env.get("JPY_SESSION_NAME", "")
            self.notebook = notebook if "/" in notebook else ""
            self.session = await self._open(
                python, self._session_name(env, kwargs.get("cwd")), self.notebook
            )
        except (ControlError, NativeError) as error:
            reason = str(error).rstrip(".")
            self._decline(reason)
        bundle = str(paths.bundle_dir())
        search = [bundle, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
        env["PYTHONPATH"] = os.pathsep.join(search)
        env["SING_BUNDLE"] = bundle
        env["SING_EXTENSIONS"] = ",".join(_extensions())
        if self.direct_gpu:
            env[gpu_access.DIRECT_VARIABLE] = "1"
        else:
            env[gpu_access.FILES_VARIABLE] = gpu_access.FILES
        await self._preload(python, env)
        if self.session:
            env["SING_SESSION"] = self.session
            env["SING_SOCKET"] = str(paths.socket_path())
            if self.form is None:
                env["SING_PROCESS_REASON"] = self._no_process
            else:
                env.setdefault(*WITHOUT_IO_URING)
        else:
            env["SING_REASON"] = reason
        kwargs["cmd"] = [*command, f"--ext={EXTENSION}"]

    def _session_name(self, env: Mapping[str, str], directory: str | None) -> str:
        program = [] if headless.is_of_server(self) else sys.argv
        other = f"kernel-{(self.kernel_id or 'unnamed')[:8]}"
        return session_name(env, program, directory or Path.cwd(), other)

    async def _preload(self, python: str, env: dict[str, str]) -> None:
        """Preload the library that tracks the kernel's files and does not open those of GPUs.

        If files are not tracked, set the reason for ``%sing``.
        """
        tracks = bool(self.track_files and self.session)
        if self.session and not tracks:
            env[tracker.REASON_VARIABLE] = "track_files is off"
        if not tracks and self.direct_gpu:
            return
        try:
            library = await in_thread(lambda: self._tracker(python, env))
            if tracks:
                journal = paths.journal_path(self.kernel_id or "")
                # The tracker appends to an existing file, but does not create one.
                os.close(os.open(journal, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
                env[tracker.JOURNAL_VARIABLE] = str(journal)
            tracker.preload(env, library)
        except (NativeError, ControlError, OSError) as error:
            self._untracked(env, str(error).rstrip("."))
        except Exception as error:
            self._untracked(env, f"internal error: {type(error).__name__}: {error}")

    def _tracker(self, python: str, env: dict[str, str]) -> Path:
        """Find the file tracker, and test it once with each interpreter.

        Raises
        ------
        NativeError
            If it cannot be built, or the interpreter does not start with it.
        """
        log_line = libraries.lines(lambda line: self.log.info("jupyter_sing: %s", line))
        library = tools.file_tracker(log_line)
        key = (python, os.stat(python).st_mtime, library)
        if key not in _trackable:
            tracker.check(python, library, env)
            _trackable.add(key)
        return library

    def _untracked(self, env: dict[str, str], reason: str) -> None:
        """Report why checkpoints of this kernel will not contain the files that it changes."""
        env[tracker.REASON_VARIABLE] = reason
        self.log.warning(
            "jupyter_sing: files of kernel %s are not tracked: %s", self.kernel_id, reason
        )

    async def _torch(self, python: str, env: dict[str, str]) -> build.TorchInfo:
        """Find the torch of an interpreter, once for each interpreter.

        Raises
        ------
        NativeError
            If it has none.
        """
        key = (python, os.stat(python).st_mtime)
        found = _torch_of.get(key)
        if found is None:
            try:
                found = await in_thread(lambda: build.find_torch(python, env))
                _torch_of[key] = found
            except NativeError as error:
                found = error  # not cached: the user may install torch and restart the kernel
        if isinstance(found, NativeError):
            raise found
        return found

    async def _open(self, python: str, name: str, notebook: str) -> str:
        """Open a session; start the daemon if needed, and let it prepare workers.

        Raises
        ------
        ControlError
            If that fails, or takes longer than `open_timeout`.
        """
        request = OpenSession(
            name=name,
            kernel_id=self.kernel_id or "",
            python=python,
            idle_timeout=self.idle_timeout,
            device=self.device or None,
            hibernate_timeout=self.hibernate_timeout,
            notebook=notebook,
            checkpoint_every=self.checkpoint_every,
            checkpoint_cells=self.checkpoint_cells,
            checkpoint_keep=self.checkpoint_keep,
            user=options.user(),
        )

        def open_session() -> OpenSessionReply:
            with connect() as control:
                reply = control.expect(OpenSessionReply, request, timeout=self.open_timeout)
                control.call(Prepare(python), timeout=self.open_timeout)
                return reply

        opened = await in_thread(open_session)
        if not self.save_process:
            self._no_process = "save_process is off"
        elif opened.form is None:
            self._no_process = opened.why
        else:
            self.form = Form(**opened.form)
        return opened.session

    async def _close(self) -> None:
        """Close the session, if there is one. It ends with the daemon, too."""
        await self.close()
        session, self.session = self.session, ""
        if not session:
            return
        request: Message = CloseSession(session, self._died)

        def close_session() -> None:
            with connect(start=False) as control:
                control.call(request, timeout=self.open_timeout)

        try:
            await in_thread(close_session)
        except ControlError as error:
            self.log.warning("jupyter_sing: session %s was not closed: %s", session, error)

    async def _offer(self, request: LastCheckpoint) -> None:
        """Announce the last checkpoint of a kernel that died, in the server's log and as an event.

        Without a daemon, this is retried when there is one; other failures are only logged.
        """
        try:
            name = await in_thread(lambda: last_checkpoint(request, self.open_timeout))
            text = f"%sing restore {name} restores its last checkpoint"
            self._emit(events.kernel_died(request.session, self.kernel_id or "", name))
        except ControlError as error:
            if error.reason == "no-daemon":
                return
            text = str(error).rstrip(".")
        except Exception as error:
            text = f"internal error: {type(error).__name__}: {error}"
        self._owed = False
        self.log.warning("jupyter_sing: kernel %s died: %s.", self.kernel_id, text)

    def _emit(self, event: dict[str, Any]) -> None:
        """Emit an event, if the server has our extension enabled."""
        logger = getattr(self.parent, "event_logger", None)
        if logger is not None and events.EVENT_ID in logger.schemas:
            logger.emit(schema_id=events.EVENT_ID, data=event)

    def _decline(self, reason: str) -> None:
        """Log, in the server's log, why this kernel is an ordinary one."""
        self.log.warning("jupyter_sing: kernel %s runs on CPU only: %s", self.kernel_id, reason)


def last_checkpoint(request: LastCheckpoint, timeout: float) -> str:
    """Return the name of the last checkpoint of a notebook whose kernel died.

    Raises
    ------
    ControlError
        If there is none, or (``no-daemon``) no daemon runs.
    """
    with connect(start=False) as control:
        reply = control.expect(CheckpointReply, request, timeout=timeout)
        return str(reply.checkpoint["name"])


def ipykernel_interpreter(language: str, command: list[str], env: dict[str, str]) -> str | None:
    """Find the Python interpreter of a command that starts ipykernel.

    Returns
    -------
    str or None
        Its absolute path; None if the command starts something else, or starts ipykernel in an
        unknown way: that kernel is not changed.
    """
    if language.lower() != "python" or "-m" not in command:
        return None
    module = command.index("-m")
    options = command[1:module]  # such as -Xfrozen_modules=off, or -X frozen_modules=off
    plain = all(text.startswith("-") or options[i - 1] == "-X" for i, text in enumerate(options))
    if not plain or command[module + 1 : module + 2] not in (["ipykernel_launcher"], ["ipykernel"]):
        return None
    python = shutil.which(command[0], path=env.get("PATH"))
    if python is None or not re.match(r"python[\d.]*$", Path(python).name):
        return None
    return os.path.abspath(python)


def _extensions() -> list[str]:
    """Return the modules to load into each IPython kernel, such as %sing, from entry points."""
    return sorted(each.module for each in entry_points(group=EXTENSIONS))


def _python_version(tag: str) -> tuple[int, int]:
    """Return the version in a cache tag such as ``cpython-311``; (0, 0) if it is not CPython."""
    found = re.match(r"cpython-(\d)(\d+)$", tag)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def session_name(
    env: Mapping[str, str], program: Sequence[str], directory: str | os.PathLike[str], other: str
) -> str:
    """Return a user-facing name for a session, escaped, because its parts are untrusted.

    Parameters
    ----------
    env : mapping
        The kernel's variables; servers set one to the path of its notebook.
    program : sequence of str
        Command line of the program that starts the kernel; empty for a server, which starts many.
    directory : path
        The kernel's working directory.
    other : str
        Name if none can be derived from these.
    """
    notebook = env.get("JPY_SESSION_NAME", "")
    named = [each for each in program[1:] if each.endswith(".ipynb") and not each.startswith("-")]
    # Papermill's second notebook is its output. For other programs, several names are ambiguous.
    if not notebook and named and (len(named) == 1 or Path(program[0]).name == "papermill"):
        notebook = named[0]
    name = Path(notebook).name or Path(os.path.abspath(directory)).name or other
    return escaped(name)[:NAME_CHARACTERS_MAX]
