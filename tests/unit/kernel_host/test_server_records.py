"""Records that a server leaves on disk are found by the same server, and by no other."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelproxy.kernel_host.server_records import KernelRecord, ServerDirectory, changes, key_of

KEY = key_of("/home/ada", "/", "1000")
RECORD = KernelRecord(
    "0b7e-1", "python3", "s1", "/home/ada/a.ipynb", {"ip": "127.0.0.1", "key": "k"}, "/home/ada",
    {"JPY_SESSION_NAME": "a.ipynb", "REMOVED": None},
)  # fmt: skip


def die(directory: ServerDirectory) -> None:
    """Do what the end of a process does."""
    os.close(directory._lock)
    directory._lock = -1


@pytest.fixture
def taken(runtime_dir: Path) -> Iterator[ServerDirectory]:
    directory = ServerDirectory.take(KEY)
    yield directory
    directory.close()


def test_the_next_server_finds_what_a_dead_one_left(taken: ServerDirectory) -> None:
    taken.write(RECORD)
    file = taken.path / "0b7e-1.kernel"
    assert (file.stat().st_mode & 0o777, taken.path.stat().st_mode & 0o777) == (0o600, 0o700)
    die(taken)
    found = ServerDirectory.take(KEY)
    assert found.path == taken.path
    assert found.records() == ([RECORD], [])
    found.remove(RECORD.kernel_id)
    found.close()
    found.close()
    assert not found.path.exists()


def test_servers_that_run_at_once_share_nothing(taken: ServerDirectory) -> None:
    second, other = ServerDirectory.take(KEY), ServerDirectory.take(key_of("/home/eve", "/", ""))
    assert len({taken.path, second.path, other.path}) == 3
    second.write(RECORD)
    die(second)
    die(taken)
    # The one with kernels first.
    third, fourth = ServerDirectory.take(KEY), ServerDirectory.take(KEY)
    assert (third.path, fourth.path) == (second.path, taken.path)
    third.remove(RECORD.kernel_id)
    for each in (third, fourth, other):
        each.close()


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '{"version": 2}', '{"version": 1}', "\0\0",
        json.dumps({"version": 1, **vars(RECORD), "cwd": 3}),
        json.dumps({"version": 1, **vars(RECORD), "more": ""}),
        json.dumps({"version": 1, **vars(RECORD)}),  # of the same kernel, under another name
    ],
)  # fmt: skip
def test_a_damaged_record_is_removed_and_reported_once(taken: ServerDirectory, text: str) -> None:
    taken.write(RECORD)
    (taken.path / "torn.kernel").write_text(text)
    records, problems = taken.records()
    assert records == [RECORD]
    assert [each.split(":")[0] for each in problems] == ["torn.kernel"]
    assert taken.records() == ([RECORD], [])
    taken.remove(RECORD.kernel_id)


@pytest.mark.parametrize("kernel_id", ["", "../../x", "a/b", "x" * 300, "caf\udce9"])
def test_any_name_of_a_kernel_gives_a_record_in_the_directory(
    taken: ServerDirectory, kernel_id: str
) -> None:
    record = KernelRecord(kernel_id, "python3", "", "", {}, "/")
    taken.write(record)
    assert taken.records() == ([record], [])
    taken.remove(kernel_id)
    assert taken.records() == ([], [])


def test_an_environment_is_kept_as_what_differs() -> None:
    server = {"PATH": "/bin", "TOKEN": "secret", "GONE": "1"}
    asked = {"PATH": "/usr/bin", "TOKEN": "secret", "JPY_SESSION_NAME": "a"}
    kept = changes(asked, server)
    assert "TOKEN" not in kept
    record = KernelRecord("k", "python3", "", "", {}, "/", kept)
    assert record.environ(server) == asked
    assert record.environ({"TOKEN": "new", "GONE": "2"}) == {**asked, "TOKEN": "new"}


@pytest.mark.parametrize("content", [b"", b"no table at all" * 99, b"SQLite format 3\0" * 99])
def test_a_damaged_table_of_sessions_is_made_anew(taken: ServerDirectory, content: bytes) -> None:
    file = taken.sessions_file
    file.write_bytes(content)
    with sqlite3.connect(taken.sessions_file) as table:
        table.execute("CREATE TABLE session (session_id, path, name, type, kernel_id)")
        table.execute("INSERT INTO session VALUES ('s', 'a', 'a', 'notebook', 'k')")
    table.close()
    with sqlite3.connect(taken.sessions_file) as table:
        assert table.execute("SELECT session_id FROM session").fetchall() == [("s",)]
    table.close()
    with sqlite3.connect(file) as table:
        table.execute("ALTER TABLE session DROP COLUMN type")
    table.close()
    assert not taken.sessions_file.exists()
