"""Reading and changing images of CRIU, and refusing files that it has not written."""

from __future__ import annotations

import contextlib
import json
import os
import random
import struct
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kernelproxy.common.errors import ProcessError
from kernelproxy.criu import images, protobuf
from kernelproxy.criu.images import Info, Mapped
from kernelproxy.criu.protobuf import BYTES, FIXED32, FIXED64, VARINT, Fields, ProtobufField

FILES = (0x54564319, 0x56303138)
MM = (0x54564319, 0x57492820)
PSTREE = (0x54564319, 0x50273030)


def message(**values: int | bytes | list[int] | list[bytes] | list[Any]) -> bytes:
    """A message of fields ``f1``, ``f2``, …."""
    fields = Fields()
    for name, value in values.items():
        number = int(name[1:])
        for each in value if isinstance(value, list) else [value]:
            fields.append(ProtobufField(number, VARINT if isinstance(each, int) else BYTES, each))
    return fields.encode()


def image(magic: tuple[int, int], *found: bytes) -> bytes:
    return protobuf.encode_entries([Fields.parse(each) for each in found], magic)


def regular(number: int, name: str, size: int) -> bytes:
    """An entry of files.img about a regular file, with a build id."""
    file = message(
        f1=number, f2=0o2, f3=7, f5=b"", f6=name.encode(), f8=size, f10=0o100644, f11=[1]
    )
    return message(f1=1, f2=number, f3=file)


def socket(number: int, port: int, *, state: int = 10, protocol: int = 6, peer: int = 0) -> bytes:
    """An entry of files.img about a socket of the internet."""
    described = message(f1=number, f5=protocol, f6=state, f7=port, f8=peer)
    return message(f1=4, f2=number, f4=described)


def write_images(directory: Path, *files: bytes, areas: list[bytes] | None = None) -> Path:
    """A directory of images of one process."""
    directory.mkdir(exist_ok=True)
    (directory / "files.img").write_bytes(image(FILES, *files))
    (directory / "mm-2.img").write_bytes(image(MM, message(f12=1, f14=areas or [])))
    (directory / "pstree.img").write_bytes(
        image(PSTREE, message(f1=2, f2=0, f3=2, f4=2, f5=[2, 9]))
    )
    (directory / "pages-1.img").write_bytes(b"pages")
    return directory


def info(**changes: object) -> Info:
    fields = {
        "kind": "user", "pid": 2, "wake_fd": 5, "uid": os.geteuid(),
        "outlets": ["pipe:[1]", "pipe:[2]"], "monotonic": 1, "boottime": 2, "locks": [],
        "mapped": [],
    }  # fmt: skip
    return Info(**{**fields, **changes})  # type: ignore[arg-type]


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize("seed", range(50))
def test_messages_are_written_as_they_were_read(seed: int) -> None:
    rng = random.Random(seed)
    fields = Fields()
    for _ in range(rng.randrange(20)):
        kind = rng.choice((VARINT, FIXED64, BYTES, FIXED32))
        value: int | bytes
        if kind == VARINT:
            value = rng.getrandbits(rng.randrange(1, 65))
        else:
            value = rng.randbytes({FIXED64: 8, FIXED32: 4}.get(kind, rng.randrange(300)))
        fields.append(ProtobufField(rng.randrange(1, 1 << 29), kind, value))
    data = fields.encode()
    assert Fields.parse(data) == fields
    assert Fields.parse(data).encode() == data
    whole = protobuf.encode_entries([fields, Fields(), fields], FILES)
    assert list(protobuf.entries(whole, FILES)) == [fields, Fields(), fields]


@pytest.mark.parametrize("seed", range(200))
def test_any_bytes_are_a_message_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    whole = bytearray(image(FILES, regular(1, "/a", 9), socket(2, 80), message(f9=[1, 300, b"xy"])))
    for _ in range(rng.randrange(1, 4)):
        whole[rng.randrange(len(whole))] = rng.randrange(256)
    del whole[rng.randrange(len(whole)) :: rng.choice((1, len(whole)))]
    with contextlib.suppress(ProcessError):  # and nothing else
        for each in protobuf.entries(bytes(whole), FILES):
            each.message(3)
            each.numbers(9)
            assert all(field.number > 0 for field in each)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x08", "does not end"),
        (b"\x08" + b"\xff" * 10, "does not end"),
        (b"\x08" + b"\xff" * 9 + b"\x7f", "too large"),
        (b"\x0a\x05abc", "longer than its message"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "longer than its message"),
        (b"\x09abc", "longer than its message"),
        (b"\x0b", "unknown kind 3"),
        (b"\x00\x00", "has no number"),
    ],
)
def test_an_invalid_message_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(ProcessError, match=why):
        Fields.parse(data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not of the kind"),
        (struct.pack("<II", *MM), "not of the kind"),
        (struct.pack("<II", *FILES) + b"\1\0", "ends within"),
        (struct.pack("<III", *FILES, 5) + b"abc", "longer than its file"),
        (struct.pack("<III", *FILES, 0xFFFFFFFF), "longer than its file"),
    ],
)
def test_an_invalid_image_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(ProcessError, match=why):
        list(protobuf.entries(data, FILES))


def test_numbers_may_be_packed() -> None:
    fields = Fields.parse(message(f5=[1, 300]) + message(f5=b"\x02\xac\x02"))
    assert fields.numbers(5) == [1, 300, 2, 300]
    with pytest.raises(ProcessError, match="no number"):
        Fields([ProtobufField(5, FIXED32, b"1234")]).numbers(5)
    with pytest.raises(ProcessError, match="holds no bytes"):
        fields.data(5)


# ---------------------------------------------------------------- what is changed


def test_sizes_of_files_that_are_not_mapped_are_dropped(tmp_path: Path) -> None:
    private, shared = message(f4=2, f5=5, f7=1 << 6), message(f4=3, f5=3, f7=1 << 7)
    files = [regular(1, "/exe", 10), regular(2, "/lib", 20), regular(3, "/map", 30)]
    files.append(regular(4, "/log", 40))
    source = write_images(tmp_path / "source", *files, areas=[private, shared])
    target = tmp_path / "target"
    target.mkdir()
    images.prepare(source, target, None)
    changed = list(protobuf.entries((target / "files.img").read_bytes(), FILES))
    kept = {}
    for each in changed:
        file = each.message(3)
        assert file is not None
        kept[file.data(6)] = (file.number(8), file.numbers(11))
        assert (file.number(3), file.number(10)) == (7, 0o100644)
    assert kept == {
        b"/exe": (10, [1]), b"/lib": (20, [1]), b"/map": (0, []), b"/log": (0, []),
    }  # fmt: skip
    assert (target / "pages-1.img").readlink() == source / "pages-1.img"
    assert (source / "files.img").read_bytes() == image(FILES, *files)


def test_ports_are_changed_where_it_listens(tmp_path: Path) -> None:
    files = [
        regular(1, "/exe", 10),
        socket(2, 1000),
        socket(3, 1001),
        socket(4, 1000, state=1, peer=7),  # a connection, which will be closed
        socket(5, 1000, protocol=17, state=7),  # of UDP
    ]
    source = write_images(tmp_path / "source", *files)
    assert images.listening(source) == {1000, 1001}
    target = tmp_path / "target"
    target.mkdir()
    images.prepare(source, target, {1000: 2000})
    assert images.listening(target) == {2000, 1001}
    changed = list(protobuf.entries((target / "files.img").read_bytes(), FILES))
    ports = [found.number(7) for each in changed if (found := each.message(4)) is not None]
    assert ports == [2000, 1001, 1000, 1000]


def unix_socket(number: int, name: bytes) -> bytes:
    """An entry of files.img about a Unix socket."""
    return message(f1=15, f2=number, f16=message(f1=number, f2=9, f3=1, f4=10, f11=name))


def test_sockets_of_ranks_are_renamed_alike_at_each_restore(tmp_path: Path) -> None:
    names = [b"\0jupyter-sing-rank-ab", b"\0jupyter-sing-rank-cd", b"\0other", b"/tmp/x", b""]
    seen: set[bytes] = set()
    for turn in range(2):
        directory = tmp_path / f"images-{turn}"
        write_images(directory, *(unix_socket(n, name) for n, name in enumerate(names)))
        found = []
        for _ in range(2):  # what is restored may be saved and restored again
            target = tmp_path / f"target-{len(seen)}"
            target.mkdir()
            images.prepare(directory, target, None)
            entries = images.read_entries(target / "files.img", FILES)
            found = [Fields(each.message(16) or ()).data(11) for each in entries]
            assert found[2:] == names[2:]
            copies = {
                each.removeprefix(name) for each, name in zip(found[:2], names[:2], strict=True)
            }
            (copy,) = copies
            assert copy.startswith(b".")
            seen.add(copy)
            write_images(directory, *(unix_socket(n, name) for n, name in enumerate(found)))
    assert len(seen) == 4


def test_images_without_files_are_damaged(tmp_path: Path) -> None:
    source = write_images(tmp_path / "source")
    (source / "files.img").unlink()
    with pytest.raises(ProcessError, match=r"files\.img is missing"):
        images.prepare(source, tmp_path, None)


@pytest.mark.parametrize(
    ("threads", "most", "expected"),
    [
        ([2, 9], 4194304, 300),
        ([2, 1000], 4194304, 1000),
        ([2, 32700], 32768, 300),
        ([2, 500, 32700], 32768, 500),
    ],
)
def test_numbers_for_the_restorer_are_free(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    threads: list[int],
    most: int,
    expected: int,
) -> None:
    monkeypatch.setattr(images, "_pid_max", lambda: most)
    (tmp_path / "pstree.img").write_bytes(image(PSTREE, message(f1=2, f3=2, f4=2, f5=threads)))
    found = images.last_pid(tmp_path)
    assert found == expected
    assert not {*range(found + 1, found + images.SPARE_PIDS)} & {*threads}


def test_a_process_with_all_numbers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "_pid_max", lambda: 1000)
    threads = list(range(2, 1000, 100))
    (tmp_path / "pstree.img").write_bytes(image(PSTREE, message(f1=2, f5=threads)))
    with pytest.raises(ProcessError, match="used up"):
        images.last_pid(tmp_path)


# ---------------------------------------------------------------- whether they fit


def test_descriptions_are_read_as_they_were_written(tmp_path: Path) -> None:
    info().write(tmp_path)
    assert Info.read(tmp_path) == info()
    images.check(tmp_path)
    images.check(Info.parse((tmp_path / images.INFO).read_bytes()))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"uid": os.geteuid() + 1}, "another user's"),
        ({"machine": "vax"}, "saved on vax"),
        ({"release": "2.4.0"}, "under Linux 2.4.0"),
        ({"cpu": ["sse2", "flux"]}, "a processor that has flux"),
        ({"mapped": [{"path": "/a"}]}, "damaged"),
        ({"mapped": [{**asdict(Mapped("", 0, 0, 0, 0, "", True, True)), "path": 0}]}, "damaged"),
        ({"mapped": ["/a"]}, "damaged"),
    ],
)
def test_other_machines_are_refused(
    tmp_path: Path, changes: dict[str, object], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "cpu_flags", lambda: {"sse2"})
    info(**changes).write(tmp_path)
    with pytest.raises(ProcessError, match=why) as caught:
        images.check(tmp_path)
    assert caught.value.reason == "restore"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read"),
        ("{", "not as it was written"),
        ("[]", "another version"),
        ('{"version": 3}', "another version"),
        (json.dumps({**asdict(info()), "pid": "2"}), "not as it was written"),
        (json.dumps({**asdict(info()), "more": 1}), "not as it was written"),
        (json.dumps({k: v for k, v in asdict(info()).items() if k != "cpu"}), "not as it was"),
    ],
)
def test_descriptions_that_were_not_written_by_us_are_refused(
    tmp_path: Path, text: str | None, why: str
) -> None:
    if text is not None:
        (tmp_path / images.INFO).write_text(text)
    with pytest.raises(ProcessError, match=why):
        images.check(tmp_path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jupyter_sing" / "mapped-files.json"


def mapped(file: Path, *, status: int = 1 << 6, code: bool = True) -> tuple[Path, Mapped]:
    """Return images of a process that has one file mapped, and what is recorded of that file."""
    exe = file.with_name("exe")
    if not exe.exists():
        exe.write_bytes(b"exe")
    area = message(f4=2, f5=5 if code else 1, f7=status)
    source = write_images(
        file.with_name("images"), regular(1, str(exe), 3), regular(2, str(file), 9), areas=[area]
    )
    _, noted = images.mapped_files(source)
    info(mapped=[asdict(noted)]).write(source)
    return source, noted


def replace(file: Path, data: bytes) -> None:
    """Put another file of the same age in its place."""
    state = file.stat()
    other = file.with_name("other")
    other.write_bytes(data)
    os.utime(other, ns=(state.st_atime_ns, state.st_mtime_ns))
    other.rename(file)


def test_mapped_files_are_known_by_their_content(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "library"
    file.write_bytes(b"content")
    source, noted = mapped(file)
    assert noted.path == str(file)
    assert noted.code
    assert noted.private
    replace(file, b"content")
    images.check(source)
    replace(file, b"CONTENT")
    with pytest.raises(ProcessError, match="has changed since"):
        images.check(source)
    replace(file, b"content and more")
    with pytest.raises(ProcessError, match="has changed since"):
        images.check(source)


def test_large_data_is_known_by_its_time(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "HASHED_BYTES_MAX", 3)
    file = tmp_path / "weights"
    file.write_bytes(b"content")
    source, noted = mapped(file, code=False)
    assert noted.digest == ""
    replace(file, b"content")
    images.check(source)
    os.utime(file, ns=(1, 1))
    with pytest.raises(ProcessError, match="has changed since"):
        images.check(source)


def test_shared_files_may_change_but_not_shrink(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "array"
    file.write_bytes(b"content")
    source, noted = mapped(file, status=1 << 7, code=False)
    assert not noted.private
    file.write_bytes(b"another content")
    images.check(source)
    file.write_bytes(b"less")
    with pytest.raises(ProcessError, match="has changed since"):
        images.check(source)


def test_digests_are_computed_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "library"
    file.write_bytes(b"content")
    _, noted = mapped(file)
    assert json.loads(cache.read_text())[str(file)][0] == noted.digest

    def never(*_: object) -> None:
        raise AssertionError("computed again")

    with monkeypatch.context() as patch:
        patch.setattr("hashlib.file_digest", never)
        assert mapped(file)[1] == noted
        replace(file, b"CONTENT")
        with pytest.raises(AssertionError, match="again"):
            mapped(file)
    assert mapped(file)[1].digest != noted.digest
    for damage in ("{", "[]", json.dumps({str(file): 1})):
        cache.write_text(damage)
        assert mapped(file)[1].digest != noted.digest


def test_removed_files_are_not_checked(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "library"
    file.write_bytes(b"content")
    source, _ = mapped(file)
    file.unlink()
    with pytest.raises(FileNotFoundError):
        images.mapped_files(source)
    remap = image((0x54564319, 0x59133954), message(f1=2, f2=9))
    (source / "remap-fpath.img").write_bytes(remap)
    assert [Path(each.path).name for each in images.mapped_files(source)] == ["exe"]
