"""Contents of the journal of a notebook's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernelproxy.kernel.files import changed_files
from kernelproxy.kernel.files.changed_files import changed

OLD = 1_000_000_000_123_456_789


def note(path: str | Path, sign: str = "") -> bytes:
    return b"\0" + sign.encode() + os.fsencode(path) + b"//"


@pytest.mark.parametrize(
    ("journal", "expected"),
    [
        (b"", []),
        (note("/a") + note("/b") + note("/a"), ["/a", "/b"]),
        (note("/a") + b"\0/b/", ["/a"]),
        (note("/a") + b"\0/b/c", ["/a"]),
        (b"\0/a/b/" + note("/c"), ["/c"]),
        (b"/a//" + note("/c"), ["/c"]),
        (b"\0" + note("/c") + b"\0\0", ["/c"]),
        (note("/a b\n/c"), ["/a b\n/c"]),
        (note(os.fsdecode(b"/\xff")), [os.fsdecode(b"/\xff")]),
        (note("/d", "?") + note("/c"), ["/c"]),
        (note("relative") + b"\0=1:/x//" + b"\0=a:b/x//" + b"\0///", []),
    ],
)
def test_notes_are_read_and_torn_ones_are_none(journal: bytes, expected: list[str]) -> None:
    assert changed(journal) == [Path(each) for each in expected]


def test_any_cut_of_a_journal_gives_a_part_of_its_paths() -> None:
    paths = ["/a", "/a/b", "/a/b c", "/d\ne"]
    journal = b"".join(map(note, paths))
    for length in range(len(journal)):
        found = [str(each) for each in changed(journal[:length] + note("/next"))]
        assert found == [*paths[: len(found) - 1], "/next"]


def test_a_file_that_was_opened_and_left_as_it_was_has_not_changed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("12345")
    os.utime(file, ns=(OLD, OLD))
    opened = note(file, f"={OLD}:5")
    assert changed(opened) == []
    assert changed(opened + note(file)) == [file]
    assert changed(note(file) + opened) == [file]
    assert changed(opened + note(file, f"={OLD - 1}:5")) == [file]
    assert changed(note(file, f"={OLD}:4")) == [file]
    file.unlink()
    assert changed(opened) == [file]


def test_gaps_are_named() -> None:
    (gap,) = changed_files.gaps(note("/a") + note("/data", "?") + note("/data", "?"))
    assert str(gap) == "/data was renamed, and not everything below it is tracked"
