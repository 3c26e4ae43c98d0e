"""Content of a directory of images: whether they can be restored here, and changes before that.

CRIU writes one file for each kind of object; we add ``sing.json``. See CRIU's ``images/*.proto``
for the field numbers.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import secrets
import socket
from collections.abc import Iterable, Mapping
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

# Field numbers of file_entry, reg_file_entry and inet_sk_entry.
_REG, _ISK = 3, 4
_REG_ID, _REG_NAME, _REG_SIZE = 1, 6, 8
#: Fields that depend on the content of a file: its size, build id and checksum.
_REG_CONTENT = (_REG_SIZE, 11, 12, 13, 14)
_ISK_PROTO, _ISK_STATE, _ISK_SRC_PORT, _ISK_DST_PORT = 5, 6, 7, 8
_TCP, _LISTEN = 6, 10
# Field numbers of file_entry and unix_sk_entry.
_USK, _USK_NAME = 16, 11
# Field numbers of mm_entry and vma_entry.
_MM_EXE, _MM_VMAS = 12, 14
_VMA_SHMID, _VMA_PROT, _VMA_STATUS = 4, 5, 7
_PROT_EXEC, _FILE_PRIVATE, _FILE_SHARED = 4, 1 << 6, 1 << 7

#: Larger files without code are identified by time and size: hashing them takes seconds.
HASHED_BYTES_MAX = 256 << 20
#: Suffix of SQLite's rollback journals.
JOURNAL = "-journal"
#: Of the names of sockets at which ranks of a job listen for each other. What follows the separator
#: distinguishes copies of a job: see `kernelproxy.kernel.collectives.transport.addresses`.
RANK_SOCKET, COPY_SEPARATOR = b"\0jupyter-sing-rank-", b"."
#: Number of process ids above those of a process that are reserved for the restoring ones.
SPARE_PIDS = 300


@dataclass(frozen=True)
class Info:
    """Content of ``sing.json``.

    Parameters
    ----------
    kind : str
        Kind of the `sandbox.Form`.
    pid : int
        Process id in its sandbox.
    wake_fd : int
        Descriptor at which it waits for a line, see `criu.wake`.
    uid : int
    outlets : list of str
        Standard output and error, as CRIU names them.
    monotonic, boottime : int
        Readings of its clocks just after it was saved, in nanoseconds.
    locks : list of str
        Device and inode of files that it may have locked.
    mapped : list of dict
        Mapped files: each a `Mapped`.
    release, machine : str
        Of the Linux kernel.
    as_root : bool
        Whether an ordinary user was root in its sandbox, as up to version 1.
    cpu : list of str
        Features of the processor.
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
            If it is missing, damaged, or of another version.
        """
        try:
            data = (directory / INFO).read_bytes()
        except OSError as error:
            raise _unreadable(error) from error
        return cls.parse(data)

    @classmethod
    def parse(cls, data: bytes) -> Info:
        """Parse the content of the file.

        Raises
        ------
        ProcessError
            If it is damaged, or of another version.
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
    """Return an object made from `found`, if its fields have the types of the example's fields."""
    kinds = {name: type(value) for name, value in vars(example).items()}
    if not isinstance(found, dict) or {k: type(v) for k, v in found.items()} != kinds:
        raise damaged(f"{INFO} is not as it was written")
    return type(example)(**found)


def cpu_flags() -> set[str]:
    """Return the features of this machine's processor, from the Linux kernel."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip().lower() in ("flags", "features"):
                return set(value.split())
    return set()


# ---------------------------------------------------------------- content


def read_entries(file: Path, magic: tuple[int, int]) -> list[Fields]:
    """Read one file of images; return an empty list if it does not exist."""
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
    """Return the ports at which the process listened."""
    sockets = [each.message(_ISK) for each in read_entries(directory / "files.img", _FILES)]
    return {each.number(_ISK_SRC_PORT) for each in sockets if each is not None and _listens(each)}


def _listens(entry: Fields) -> bool:
    return entry.number(_ISK_PROTO) == _TCP and entry.number(_ISK_STATE) == _LISTEN


def last_pid(directory: Path) -> int:
    """Return a process id after which the next `SPARE_PIDS` were not used by the processes.

    Raises
    ------
    ProcessError
        If there is none.
    """
    taken = {0}
    for each in read_entries(directory / "pstree.img", _PSTREE):
        for number in (1, 3, 4, 5):
            taken |= set(each.numbers(number))
    top = _pid_max()
    ordered = [*sorted(taken), top]
    for low, high in reversed(list(itertools.pairwise(ordered))):
        # After the highest process id, they start again at 300.
        if high - low > SPARE_PIDS:
            return max(low, SPARE_PIDS)
    raise ProcessError("the process has used up all numbers of processes", "restore")


def _pid_max() -> int:
    return int(Path("/proc/sys/kernel/pid_max").read_text("ascii"))


def frozen_seconds(directory: Path) -> float:
    """Return how long the process was stopped when it was saved."""
    for each in read_entries(directory / "stats-dump", _STATS):
        if (dump := each.message(1)) is not None:
            return dump.number(2) / 1e6
    return 0.0


# ---------------------------------------------------------------- mapped files


@dataclass(frozen=True)
class Mapped:
    """File that was mapped when the process was saved.

    Parameters
    ----------
    path : str
    size, inode, mtime, ctime : int
        Bytes, and nanoseconds.
    digest : str
        Digest of its content; empty if the content may change.
    code : bool
        Whether it contains executed code.
    private : bool
        Whether it is mapped privately, so that unchanged pages are not in the images.
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
    """Describe the mapped files: pages that were only read are not in the images.

    Raises
    ------
    ProcessError
        If the images are damaged.
    OSError
        If such a file cannot be read.
    """
    names = _kept_files(directory)
    with Digests() as digests:
        return [
            _describe(names[number], digests, code=code, private=private)
            for number, (code, private) in sorted(_uses(directory).items())
            if number in names
        ]


def _kept_files(directory: Path) -> dict[int, str]:
    """Return the regular files in use by number, without removed ones: those are in the images."""
    names = {}
    for each in read_entries(directory / "files.img", _FILES):
        if (file := each.message(_REG)) is not None:
            names[file.number(_REG_ID)] = os.fsdecode(file.data(_REG_NAME))
    for each in read_entries(directory / "remap-fpath.img", _REMAP):
        names.pop(each.number(1), None)
    return names


def in_transaction(directory: Path) -> list[str]:
    """Return the databases with an open transaction, see `databases_in_transaction`."""
    return databases_in_transaction(_kept_files(directory).values())


def databases_in_transaction(files: Iterable[str]) -> list[str]:
    """Return the SQLite databases among open files that have an open rollback journal.

    The end of the transaction removes the journal, also if another process rolls it back. After
    that, a process that had it open cannot be restored, and must not be: it would continue a
    transaction on a database that has changed.
    """
    names = set(files)
    found = (each.removesuffix(JOURNAL) for each in names if each.endswith(JOURNAL))
    return sorted(names.intersection(found))


def _uses(directory: Path) -> dict[int, tuple[bool, bool]]:
    """Return, by file number, whether any mapping of the file has code, and any is private."""
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


# ---------------------------------------------------------------- compatibility


def check(found: Path | Info) -> None:
    """Check that images can be restored on this machine in its current state.

    Parameters
    ----------
    found : Path or Info
        Directory of the images, or content of ``sing.json``.

    Raises
    ------
    ProcessError
        If they cannot be restored, with the reason.
    """
    info = Info.read(found) if isinstance(found, Path) else found
    check_machine(info)
    example = Mapped("", 0, 0, 0, 0, "", False, False)
    mapped = [_like(example, each) for each in info.mapped]
    with Digests() as digests:
        for each in mapped:
            _check_mapped(each, digests)


def check_machine(info: Info) -> None:
    """Check that a process was saved on a machine like this one, by this user.

    Raises
    ------
    ProcessError
        If it was not.
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
            same = state.st_size >= file.size  # shared: other processes may write to it
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


# ---------------------------------------------------------------- changes


def prepare(directory: Path, target: Path, ports: Mapping[int, int] | None) -> None:
    """Fill a directory with links to images, and with changed copies where necessary.

    CRIU compares sizes and would refuse files that have grown. The content of files is not part of
    a process's state, except for mapped files, which `check` compares.

    Parameters
    ----------
    directory : Path
        Directory of the images.
    target : Path
        Empty directory.
    ports : mapping or None
        New ports for ports at which the process listened, by the old ones. Other ports are
        unchanged, except those that the system chose and that are in use now. None: all ports are
        unchanged.

    Raises
    ------
    ProcessError
        If the images are damaged, or the process did not listen at one of the ports.
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
    copy = COPY_SEPARATOR + secrets.token_hex(8).encode()
    changed = [_renamed(_changed(each, private, moved), copy) for each in found]
    (target / "files.img").write_bytes(encode_entries(changed, _FILES))


def _elsewhere(ports: set[int]) -> dict[int, int]:
    """Return new ports for those that the system chose and that are in use.

    An example is the port at which ipykernel's debugger connects to itself, in a kernel that still
    runs.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("ascii").split())
    taken = [port for port in ports & _taken() if low <= port <= high]
    with contextlib.ExitStack() as held:
        free = [held.enter_context(socket.create_server(("", 0))) for _ in taken]
        return {port: each.getsockname()[1] for port, each in zip(taken, free, strict=True)}


def _taken() -> set[int]:
    """Return the ports on which any process listens."""
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


def _renamed(entry: Fields, copy: bytes) -> Fields:
    """Give the socket of a rank another name: the original may listen at the former one."""
    socket = entry.message(_USK)
    if socket is not None and (name := socket.data(_USK_NAME)).startswith(RANK_SOCKET):
        socket.put(_USK_NAME, name.partition(COPY_SEPARATOR)[0] + copy)
        entry = Fields(entry)
        entry.put(_USK, socket.encode())
    return entry
