"""What is in a directory of images: whether they can be restored here, and what is changed first.

CRIU writes one file for each kind of thing; we add ``sing.json``. See CRIU's ``images/*.proto`` for
the numbers of fields.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kernelproxy.common.errors import ProcessError
from kernelproxy.common.untrusted import parse_json
from kernelproxy.criu.digests import Digests
from kernelproxy.criu.protobuf import Fields, damaged, encode_entries, entries

T = TypeVar("T")

INFO = "sing.json"
VERSION = 2

_COMMON = 0x54564319
_FILES = (_COMMON, 0x56303138)
_MM = (_COMMON, 0x57492820)
_PSTREE = (_COMMON, 0x50273030)
_REMAP = (_COMMON, 0x59133954)
_STATS = (0x55105940, 0x57093306)

# Of file_entry, reg_file_entry and inet_sk_entry.
_REG, _ISK = 3, 4
_REG_ID, _REG_NAME, _REG_SIZE = 1, 6, 8
#: What depends on the content of a file: its size, build id and checksum.
_REG_CONTENT = (_REG_SIZE, 11, 12, 13, 14)
_ISK_PROTO, _ISK_STATE, _ISK_SRC_PORT, _ISK_DST_PORT = 5, 6, 7, 8
_TCP, _LISTEN = 6, 10
# Of mm_entry and vma_entry.
_MM_EXE, _MM_VMAS = 12, 14
_VMA_SHMID, _VMA_PROT, _VMA_STATUS = 4, 5, 7
_PROT_EXEC, _FILE_PRIVATE, _FILE_SHARED = 4, 1 << 6, 1 << 7

#: Larger files that hold no code are known by their time and size: hashing takes seconds.
HASHED_BYTES_MAX = 256 << 20
#: Numbers above those of a process that are left to what restores it.
SPARE_PIDS = 300


@dataclass(frozen=True)
class Info:
    """What ``sing.json`` says.

    Parameters
    ----------
    kind : str
        Of the `sandbox.Form`.
    pid : int
        The process's number in its sandbox.
    wake_fd : int
        Where it waits for a line, see `criu.wake`.
    uid : int
    outlets : list of str
        Its standard output and error, as CRIU names them.
    monotonic, boottime : int
        Nanoseconds that its clocks had not reached when it was saved.
    locks : list of str
        Device and inode of files that it may have locked.
    mapped : list of dict
        Files that it had mapped: of each a `Mapped`.
    release, machine : str
        Of the kernel.
    as_root : bool
        Whether an ordinary user was root in its sandbox, as up to version 1.
    cpu : list of str
        What the processor can do.
    version : int
    """

    kind: str
    pid: int
    wake_fd: int
    uid: int
    outlets: list[str]
    monotonic: int
    boottime: int
    locks: list[str]
    mapped: list[dict[str, Any]]
    as_root: bool = False
    release: str = field(default_factory=platform.release)
    machine: str = field(default_factory=platform.machine)
    cpu: list[str] = field(default_factory=lambda: sorted(cpu_flags()))
    version: int = VERSION

    def write(self, directory: Path) -> None:
        """Write the file."""
        (directory / INFO).write_text(json.dumps(asdict(self)), "utf-8")

    @classmethod
    def read(cls, directory: Path) -> Info:
        """Read the file.

        Raises
        ------
        ProcessError
            It is not there, or not whole, or of a later version.
        """
        try:
            data = (directory / INFO).read_bytes()
        except OSError as error:
            raise _unreadable(error) from error
        return cls.parse(data)

    @classmethod
    def parse(cls, data: bytes) -> Info:
        """What a file of these bytes says.

        Raises
        ------
        ProcessError
            It is not whole, or of a later version.
        """
        try:
            found = parse_json(data)
        except ValueError as error:
            raise damaged(f"{INFO} is not as it was written") from error
        if isinstance(found, dict) and found.get("version") == 1:
            found |= {"version": VERSION, "as_root": found.get("kind") == "user"}
        if not isinstance(found, dict) or found.get("version") != VERSION:
            raise ProcessError(
                "the images of the process are of another version of jupyter_sing", "restore"
            )
        return _like(cls("", 0, 0, 0, [], 0, 0, [], []), found)


def _like(example: T, found: Any) -> T:
    """What `found` describes, if its fields are of the types that those of an example are of."""
    kinds = {name: type(value) for name, value in vars(example).items()}
    if not isinstance(found, dict) or {k: type(v) for k, v in found.items()} != kinds:
        raise damaged(f"{INFO} is not as it was written")
    return type(example)(**found)


def cpu_flags() -> set[str]:
    """What this machine's processor can do, as the kernel says."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip().lower() in ("flags", "features"):
                return set(value.split())
    return set()


# ---------------------------------------------------------------- what they hold


def read_entries(file: Path, magic: tuple[int, int]) -> list[Fields]:
    """Read one file of images; nothing if it is not there."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(error) from error
    return list(entries(data, magic))


def _unreadable(error: OSError) -> ProcessError:
    return ProcessError(f"the images of the process cannot be read: {error}", "restore")


def listening(directory: Path) -> set[int]:
    """Ports at which the process listened."""
    sockets = [each.message(_ISK) for each in read_entries(directory / "files.img", _FILES)]
    return {each.number(_ISK_SRC_PORT) for each in sockets if each is not None and _listens(each)}


def _listens(entry: Fields) -> bool:
    return entry.number(_ISK_PROTO) == _TCP and entry.number(_ISK_STATE) == _LISTEN


def last_pid(directory: Path) -> int:
    """A number that none of the following `SPARE_PIDS` were used by the processes.

    Raises
    ------
    ProcessError
        There is none.
    """
    taken = {0}
    for each in read_entries(directory / "pstree.img", _PSTREE):
        for number in (1, 3, 4, 5):
            taken |= set(each.numbers(number))
    top = _pid_max()
    ordered = [*sorted(taken), top]
    for low, high in reversed(list(itertools.pairwise(ordered))):
        # After the highest one, numbers begin anew, with 300.
        if high - low > SPARE_PIDS:
            return max(low, SPARE_PIDS)
    raise ProcessError("the process has used up all numbers of processes", "restore")


def _pid_max() -> int:
    return int(Path("/proc/sys/kernel/pid_max").read_text("ascii"))


def frozen_seconds(directory: Path) -> float:
    """How long the process stood still when it was saved."""
    for each in read_entries(directory / "stats-dump", _STATS):
        if (dump := each.message(1)) is not None:
            return dump.number(2) / 1e6
    return 0.0


# ---------------------------------------------------------------- mapped files


@dataclass(frozen=True)
class Mapped:
    """A file that was mapped when the process was saved.

    Parameters
    ----------
    path : str
    size, inode, mtime, ctime : int
        Bytes, and nanoseconds.
    digest : str
        Of its content; empty if that may change.
    code : bool
        Whether it is executed.
    private : bool
        Whether unchanged pages of it are missing in the images, rather than shared with others.
    """

    path: str
    size: int
    inode: int
    mtime: int
    ctime: int
    digest: str
    code: bool
    private: bool


def mapped_files(directory: Path) -> list[Mapped]:
    """Describe the files that were mapped: pages of them that were only read are not in the images.

    Raises
    ------
    ProcessError
        The images are not whole.
    OSError
        Such a file cannot be read.
    """
    names = {}
    for each in read_entries(directory / "files.img", _FILES):
        if (file := each.message(_REG)) is not None:
            names[file.number(_REG_ID)] = os.fsdecode(file.data(_REG_NAME))
    # Those that were removed are in the images.
    for each in read_entries(directory / "remap-fpath.img", _REMAP):
        names.pop(each.number(1), None)
    with Digests() as digests:
        return [
            _describe(names[number], digests, code=code, private=private)
            for number, (code, private) in sorted(_uses(directory).items())
            if number in names
        ]


def _uses(directory: Path) -> dict[int, tuple[bool, bool]]:
    """Numbers of mapped files: whether any mapping of it is of code, and any is private."""
    uses: dict[int, tuple[bool, bool]] = {}
    for file in sorted(directory.glob("mm-*.img")):
        for each in read_entries(file, _MM):
            uses[each.number(_MM_EXE)] = (True, True)
            for area in map(Fields.parse, each.all_data(_MM_VMAS)):
                status = area.number(_VMA_STATUS)
                if not status & (_FILE_PRIVATE | _FILE_SHARED):
                    continue
                number = area.number(_VMA_SHMID)
                code, private = uses.get(number, (False, False))
                uses[number] = (
                    code or bool(area.number(_VMA_PROT) & _PROT_EXEC),
                    private or bool(status & _FILE_PRIVATE),
                )
    return uses


def _describe(path: str, digests: Digests, *, code: bool, private: bool) -> Mapped:
    state = os.stat(path)
    hashed = private and (code or state.st_size <= HASHED_BYTES_MAX)
    return Mapped(
        path, state.st_size, state.st_ino, state.st_mtime_ns, state.st_ctime_ns,
        digests.of(path, state) if hashed else "", code, private,
    )  # fmt: skip


# ---------------------------------------------------------------- whether they fit


def check(found: Path | Info) -> None:
    """Make sure that images can be restored on this machine as it is now.

    Parameters
    ----------
    found : Path or Info
        Where they are, or what ``sing.json`` says.

    Raises
    ------
    ProcessError
        They cannot, and why.
    """
    info = Info.read(found) if isinstance(found, Path) else found
    check_machine(info)
    example = Mapped("", 0, 0, 0, 0, "", False, False)
    mapped = [_like(example, each) for each in info.mapped]
    with Digests() as digests:
        for each in mapped:
            _check_mapped(each, digests)


def check_machine(info: Info) -> None:
    """Make sure that a process was saved on a machine like this one, by this user.

    Raises
    ------
    ProcessError
        It was not.
    """
    if info.uid != os.geteuid():
        raise ProcessError("the process was another user's", "restore")
    if info.machine != platform.machine():
        raise ProcessError(
            f"the process was saved on {info.machine}, and this is {platform.machine()}", "restore"
        )
    if info.release != platform.release():
        raise ProcessError(
            f"the process was saved under Linux {info.release}, and this is {platform.release()}",
            "restore",
        )
    if missing := set(info.cpu) - cpu_flags():
        raise ProcessError(
            f"the process was saved on a processor that has {', '.join(sorted(missing)[:3])},"
            " and this one has not",
            "restore",
        )


def _check_mapped(file: Mapped, digests: Digests) -> None:
    try:
        state = os.stat(file.path)
        seen = (state.st_size, state.st_ino, state.st_mtime_ns, state.st_ctime_ns)
        if seen == (file.size, file.inode, file.mtime, file.ctime):
            return
        if not file.private:
            same = state.st_size >= file.size  # others may write to it: that is what it is for
        elif state.st_size != file.size:
            same = False
        elif file.digest:
            same = digests.of(file.path, state) == file.digest
        else:
            same = state.st_mtime_ns == file.mtime
    except OSError as error:
        raise ProcessError(
            f"the process uses {file.path}, which is not there any more", "restore"
        ) from error
    if not same:
        raise ProcessError(
            f"the process uses {file.path}, which has changed since it was saved", "restore"
        )


# ---------------------------------------------------------------- what is changed


def prepare(directory: Path, target: Path, ports: Mapping[int, int] | None) -> None:
    """Fill a directory with links to images, and with changed copies of what must be changed.

    Files that have grown would not be accepted, as CRIU compares sizes; what files hold is not
    what a process's state consists of, except for what it has mapped, which `check` looks at.

    Parameters
    ----------
    directory : Path
        The images.
    target : Path
        Empty.
    ports : mapping or None
        Ports at which the process listened, and those at which it is to listen. Others stay as
        they are, unless they were chosen by the system and somebody else listens there. None: all
        stay as they are.

    Raises
    ------
    ProcessError
        The images are not whole, or the process did not listen there.
    """
    before, moved = listening(directory), dict(ports or {})
    if unknown := set(moved) - before:
        raise ProcessError(f"the process did not listen at port {min(unknown)}", "restore")
    if ports is not None:
        moved |= _elsewhere(before - set(moved))
    for file in directory.iterdir():
        if file.name not in ("files.img", INFO):
            (target / file.name).symlink_to(file.absolute())
    private = {number for number, (_, private) in _uses(directory).items() if private}
    found = read_entries(directory / "files.img", _FILES)
    if not found:
        raise damaged("files.img is missing")
    changed = [_changed(each, private, moved) for each in found]
    (target / "files.img").write_bytes(encode_entries(changed, _FILES))


def _elsewhere(ports: set[int]) -> dict[int, int]:
    """Other ports for those that the system chose, and that are taken.

    Such as the one at which ipykernel's debugger talks to itself, in a kernel that lives on.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("ascii").split())
    taken = [port for port in ports & _taken() if low <= port <= high]
    with contextlib.ExitStack() as held:
        free = [held.enter_context(socket.create_server(("", 0))) for _ in taken]
        return {port: each.getsockname()[1] for port, each in zip(taken, free, strict=True)}


def _taken() -> set[int]:
    """Ports at which somebody listens."""
    found = set()
    for name in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path(f"/proc/net/{name}").read_text("ascii").splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if int(state, 16) == _LISTEN:
                    found.add(int(local.rpartition(":")[2], 16))
    return found


def _changed(entry: Fields, private: set[int], ports: Mapping[int, int]) -> Fields:
    file, socket = entry.message(_REG), entry.message(_ISK)
    if file is not None and file.number(_REG_ID) not in private:
        file.drop(*_REG_CONTENT)
        entry = Fields(entry)
        entry.put(_REG, file.encode())
    if socket is not None and socket.number(_ISK_PROTO) == _TCP:
        port = socket.number(_ISK_SRC_PORT)
        if port in ports and not socket.number(_ISK_DST_PORT):
            socket.put(_ISK_SRC_PORT, ports[port])
            entry = Fields(entry)
            entry.put(_ISK, socket.encode())
    return entry
