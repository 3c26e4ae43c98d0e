"""Protection of the system daemon against its users."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from kernelproxy.agent.api.peer_limits import (
    SESSIONS_MAX,
    LogFilter,
    check_count,
    check_request,
    tame,
)
from kernelproxy.agent.status.session_status import outline
from kernelproxy.common.errors import ControlError, ProtocolError, WorkerError
from kernelproxy.common.ipc import fd_validation
from kernelproxy.common.ipc.fd_validation import (
    Discards,
    Guard,
    check_snapshot,
    fix_snapshot,
    is_harmless,
)
from kernelproxy.common.ipc.peer import Owner, check_forked, check_path
from kernelproxy.common.protocol import OpenSession, snapshot_tables


def test_an_owner_comes_from_peer_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of root's")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        owner = Owner.at(ours).of_home("/home/alice")
    assert (owner.uid, owner.gid, owner.groups) == (
        os.getuid(), os.getgid(), tuple(os.getgroups()),
    )  # fmt: skip
    environment = owner.environment()
    assert environment["HOME"] == "/home/alice"
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert "SECRET" not in environment
    assert Owner.adopt({**owner.__dict__, "groups": list(owner.groups)}) == owner


@pytest.mark.parametrize("path", ["", "python", "../python", "/a\0b", "/" + "x" * 5000])
def test_an_invalid_path_is_refused(path: str) -> None:
    with pytest.raises(ControlError, match="is no absolute path"):
        check_path(path)


def test_only_a_child_of_a_zygote_is_its_worker() -> None:
    """Descriptors of any process can be opened and sent."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        pidfd = os.pidfd_open(child.pid)
        me, uid = os.getpid(), os.getuid()
        assert check_forked(pidfd, child.pid, me, uid)
        assert not check_forked(pidfd, me, me, uid)  # it claims to be another one
        assert not check_forked(pidfd, child.pid, 1, uid)  # of another parent
        assert not check_forked(pidfd, child.pid, me, uid + 1)  # of another user
        ours = os.pidfd_open(me)
        assert not check_forked(ours, me, me, uid)
        assert not check_forked(0, child.pid, me, uid)  # no process at all
        child.kill()
        child.wait()
        assert not check_forked(pidfd, child.pid, me, uid)
        os.close(ours)
        os.close(pidfd)


def test_only_descriptors_that_cannot_make_us_wait_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, (reading, writing) = os.memfd_create("memory"), os.pipe()
    process = os.pidfd_open(os.getpid())
    assert is_harmless(memory)
    assert is_harmless(process)
    assert not is_harmless(reading)
    ours, theirs = socket.socketpair()
    assert not is_harmless(ours.fileno())
    with tempfile.TemporaryFile() as file:
        mount = Path(f"/proc/self/fdinfo/{file.fileno()}").read_text().split("mnt_id:")[1].split()
        kind = fd_validation._type_of(mount[0])
        assert is_harmless(file.fileno()) == (kind in fd_validation._LOCAL)
        monkeypatch.setattr(fd_validation, "_LOCAL", {kind})
        assert is_harmless(file.fileno())
        monkeypatch.setattr(fd_validation, "_LOCAL", {"another"})
        assert is_harmless(file.fileno()) == (kind == "tmpfs")  # which is memory
    # One of them is bad, so all are closed.
    file_of_memory = os.fstat(memory).st_ino
    with pytest.raises(ProtocolError, match="on no disk"):
        Guard(1).check([memory, reading])
    poll = select.poll()
    poll.register(writing, 0)
    assert poll.poll(120_000)  # no process reads from it any more
    os.close(writing)
    with contextlib.suppress(OSError):  # another thread may have opened a file of that number
        assert os.fstat(memory).st_ino != file_of_memory
    os.close(process)
    ours.close()
    theirs.close()


def test_messages_that_never_end_are_bounded() -> None:
    guards = [Guard(77) for _ in range(5)]
    for guard in guards[:4]:
        guard.hold(8 << 20)
    another = Guard(78)
    another.hold(8 << 20)
    another.hold(0)
    with pytest.raises(ProtocolError, match="Too much"):
        guards[4].hold(1)
    for guard in guards:
        guard.hold(0)
    guards[4].hold(1)
    guards[4].hold(0)
    assert 77 not in Guard._held


def test_a_peer_that_sends_unclosable_files_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on, entered = threading.Event(), threading.Semaphore(0)
    closed = []

    def close(fd: int) -> None:
        entered.release()
        go_on.wait()
        closed.append(fd)

    discards = Discards()
    monkeypatch.setattr("os.close", close)
    for number in range(Discards.MAX):
        assert not discards.full(7)
        discards.close(7, -1 - number)
    for _ in range(Discards.MAX):
        entered.acquire()
    assert discards.full(7)
    assert not discards.full(8)
    go_on.set()
    while discards.full(7):
        pass
    for thread in threading.enumerate():
        if thread.name == "sing-close":
            thread.join()
    assert len(closed) == Discards.MAX


def snapshot(count: int = 4096, position: int = 5) -> bytes:
    total = snapshot_tables.HEADER.size + snapshot_tables.ENTRY.size
    header = snapshot_tables.HEADER.pack(
        snapshot_tables.MAGIC,
        snapshot_tables.VERSION,
        0,
        position,
        total,
        count,
        snapshot_tables.HEADER.size,
        1,
        0,
    )
    return header + snapshot_tables.ENTRY.pack(0, count, 1, 0, 1)


def test_a_snapshot_stays_as_it_came() -> None:
    fd = os.memfd_create("snapshot", os.MFD_ALLOW_SEALING)
    os.write(fd, snapshot())
    fix_snapshot(fd)
    for change in (lambda: os.ftruncate(fd, 0), lambda: os.pwrite(fd, b"x", 0)):
        with pytest.raises(PermissionError):
            change()
    fix_snapshot(fd)
    check_snapshot(fd, 5, 4096)
    with pytest.raises(WorkerError, match="what no device holds"):
        check_snapshot(fd, 6, 4096)
    with pytest.raises(WorkerError, match="what no device holds"):
        check_snapshot(fd, 5, 4095)
    os.close(fd)


def test_a_snapshot_that_may_change_is_refused() -> None:
    sealed = os.memfd_create("snapshot")  # it can no longer be sealed
    large = os.memfd_create("snapshot", os.MFD_ALLOW_SEALING)
    os.ftruncate(large, 1 << 40)
    half = os.memfd_create("snapshot", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(half, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    with tempfile.TemporaryFile() as file:
        for fd in (sealed, large, half, file.fileno()):
            with pytest.raises(WorkerError, match="may change"):
                fix_snapshot(fd)
    for fd in (sealed, large, half):
        os.close(fd)


def test_requests_are_bounded() -> None:
    fine = OpenSession("Übung 1.ipynb", "kernel", "/usr/bin/python")
    check_request(fine, SESSIONS_MAX - 1)
    with pytest.raises(ControlError, match="sessions already"):
        check_request(fine, SESSIONS_MAX)
    check_count(SESSIONS_MAX - 4, 4)
    with pytest.raises(ControlError, match="use fewer ranks"):
        check_count(SESSIONS_MAX - 4, 5)
    with pytest.raises(ControlError, match="is not a valid name"):
        check_request(OpenSession("n", "", "/python", parent="two\nlines"), 0)
    for name in (
        "実験\u30001.ipynb",
        "a\xa0b",
        "\U0001f469\u200d\U0001f4bb.ipynb",
        "\u0645\u06cc\u200c\u062e",
    ):
        check_request(OpenSession(name, "kernel", "/usr/bin/python", notebook=f"/{name}"), 0)
    for name in ("two\nlines", "x" * 2000, "\x1b[31m", "\x9b31m", "a\u202eb", "\ud800"):
        with pytest.raises(ControlError, match="is not a valid name"):
            check_request(OpenSession(name, "kernel", "/usr/bin/python"), 0)
    assert tame("a\nb\u202e") == "a\\nb\\u202e"


def test_the_log_takes_so_much_and_no_more() -> None:
    modesty = LogFilter()
    record = logging.LogRecord("name", logging.INFO, __file__, 1, "line", None, None)
    written = sum(modesty.filter(record) for _ in range(100_000))
    assert 1000 <= written < 50_000
    modesty._left = 1.0
    assert modesty.filter(record)
    assert "lines were dropped) line" in record.msg


def test_public_fields_of_a_session() -> None:
    whole: Any = {  # some fields of a session, and one that is not known
        "id": "1", "name": "secret", "owner": "bob", "kernel_pid": 5, "worker_pid": None,
        "state": "running", "device": "cpu:0", "memory": 7, "queued_for": 1.5, "reason": "secret",
        "automatic": {"every": 1.0, "problem": "secret"}, "last_checkpoint": {"name": "secret"},
        "some_new_thing": ["secret"], "operators": 3, "queue_position": 2, "expected_wait": 3.5,
    }  # fmt: skip
    seen = outline(whole)
    assert seen.keys() == whole.keys()
    assert "secret" not in str(seen)
    shown = ("id", "owner", "state", "device", "memory", "queued_for")
    assert [dict(seen)[each] for each in shown] == [dict(whole)[each] for each in shown]
    assert (seen["kernel_pid"], seen["operators"]) == (None, 0)
    assert (seen["queue_position"], seen["expected_wait"]) == (None, None)
    assert (seen["automatic"], seen["last_checkpoint"]) == ({"every": 0.0, "problem": ""}, None)
