"""Saving a namespace and restoring it in the same process: aliasing, failures, buffers, devices."""

from __future__ import annotations

import ctypes
import random
import socket
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernelproxy.common.errors import StoreError
from kernelproxy.kernel.namespace import Captured, RestoredNamespace, capture, restore
from kernelproxy.kernel.namespace.types import BUFFER_BYTES


def notebook(source: str, **given: Any) -> dict[str, Any]:
    """Return the namespace after a cell."""
    namespace = {"__name__": "__main__", **given}
    exec(textwrap.dedent(source), namespace)
    return namespace


def again(captured: Captured, device: Any = None, into: Any = None) -> RestoredNamespace:
    copies = [bytes(view) for view in captured.buffers]
    return restore(captured.stream, copies, device, into=into)


def whole(namespace: dict[str, Any], device: Any = None) -> dict[str, Any]:
    """Save and restore, without any problems."""
    captured = capture(namespace, device)
    assert captured.omitted == []
    restored = again(captured, device)
    assert restored.problems == []
    return restored.namespace


# ---------------------------------------------------------------- aliasing


def build(seed: int) -> dict[str, Any]:
    """Return variables that refer to each other in random ways."""
    draw = random.Random(seed)
    things: list[Any] = [[], {}, set(), bytearray(b"x" * 10), np.arange(20.0), torch.arange(20.0)]
    things += [np.zeros((3, 20_000)), torch.zeros(30_000), np.asfortranarray(np.ones((4, 5)))]
    for step in range(40):
        of = draw.choice(things)
        kind = draw.randrange(8)
        if kind == 0 and isinstance(of, np.ndarray) and of.ndim and len(of) > 2:
            things.append(of[draw.randrange(1, len(of)) :: draw.choice((1, 2, -1))])
        elif kind == 1 and isinstance(of, torch.Tensor) and of.ndim and len(of) > 2:
            things.append(of[draw.randrange(1, len(of)) :: draw.choice((1, 2))])
        elif kind == 2 and isinstance(of, np.ndarray):
            things.append(of.T)
        elif kind == 3 and isinstance(of, torch.Tensor) and of.is_contiguous():
            things.append(of.numpy())
        elif kind == 4 and isinstance(of, np.ndarray) and min(of.strides, default=0) > 0:
            things.append(torch.from_numpy(of))
        elif kind == 5:
            things.append((of, draw.choice(things)))
        else:
            box = draw.choice([thing for thing in things if isinstance(thing, list | dict)])
            if isinstance(box, list):
                box.append(of)
            else:
                box[step] = of
    draw.shuffle(things)
    return {f"v{index}": thing for index, thing in enumerate(things)}


def shape_of(namespace: dict[str, Any]) -> list[Any]:
    """Return the structure of a namespace, up to addresses: content, identities, shared memory."""
    numbers: dict[int, int] = {}
    memory: list[tuple[int, int]] = []
    facts: list[Any] = []

    def look(obj: Any) -> None:
        if id(obj) in numbers:
            facts.append(("again", numbers[id(obj)]))
            return
        numbers[id(obj)] = len(numbers)
        if isinstance(obj, list | tuple):
            facts.append((type(obj).__name__, len(obj)))
            for item in obj:
                look(item)
        elif isinstance(obj, dict):
            facts.append(("dict", list(obj)))
            for item in obj.values():
                look(item)
        elif isinstance(obj, np.ndarray):
            facts.append(("array", obj.shape, obj.strides, obj.tolist()))
            memory.append((obj.__array_interface__["data"][0], len(numbers)))
        elif isinstance(obj, torch.Tensor):
            facts.append(("tensor", obj.shape, obj.stride(), obj.tolist()))
            memory.append((obj.data_ptr(), len(numbers)))
        else:
            facts.append((type(obj).__name__, obj))

    for value in namespace.values():
        look(value)
    return facts


@pytest.mark.parametrize("seed", range(25))
def test_aliasing_is_kept(seed: int) -> None:
    before = build(seed)
    after = whole(before)
    assert shape_of(after) == shape_of(before)
    # A write through each view must be visible through the same other views in both.
    windows = [name for name, v in before.items() if isinstance(v, np.ndarray | torch.Tensor)]
    for turn, name in enumerate(windows):
        for space in (before, after):
            if space[name].ndim:
                space[name][0] = -1.0 - turn
    assert shape_of(after) == shape_of(before)


def test_functions_see_the_restored_namespace() -> None:
    before = notebook(
        """
        total = 1
        def add(n):
            global total
            total += n
            return total
        read = lambda: total
        """
    )
    into: dict[str, Any] = {"__name__": "__main__", "other": 5}
    again(capture(before), into=into)
    assert into["add"].__globals__ is into
    assert into["add"](4) == 5
    into["total"] = 10
    assert into["read"]() == 10
    assert before["total"] == 1
    assert into["other"] == 5


def test_three_restores_are_independent() -> None:
    before = notebook("class A: pass\na = A(); a.x = [1]\nimport numpy\nv = numpy.zeros(9000)")
    captured = capture(before)
    worlds = [again(captured).namespace for _ in range(3)]
    for index, world in enumerate(worlds):
        world["A"].mark = index
        world["a"].x.append(index)
        world["v"][0] = index
    assert [world["a"].mark for world in worlds] == [0, 1, 2]
    assert [world["a"].x for world in worlds] == [[1, 0], [1, 1], [1, 2]]
    assert [world["v"][0] for world in worlds] == [0, 1, 2]
    assert not hasattr(before["A"], "mark")


def test_frames_that_share_until_written_do_so_again() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1, 2]})
    after = whole({"frame": frame, "column": frame["a"], "other": frame[:]})
    after["frame"].iloc[0, 0] = 9
    assert after["column"].tolist() == [1, 2]
    assert after["other"]["a"].tolist() == [1, 2]


def test_array_over_part_of_whose_memory_a_tensor_is() -> None:
    array = np.zeros(10)
    after = whole({"tensor": torch.from_numpy(array[4:]), "array": array})
    after["array"][5] = 7
    assert after["tensor"][1] == 7


# ---------------------------------------------------------------- what is not saved


class ServerVariable:
    def __init__(self, sock: Any) -> None:
        self.sock = sock


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    with socket.socket() as made:
        yield made


def test_offenders_are_named_by_their_path(sock: socket.socket) -> None:
    def closure() -> Any:
        return sock

    closure.__module__ = "__main__"
    namespace = {
        "plain": sock,
        "server": ServerVariable(sock),
        "table": {"a": [1, (sock,)]},
        "closure": closure,
        "held": {"x": (i for i in tuple[int, ...]())},
        "array": np.array([None, sock], dtype=object),
    }
    lines = {line.name: line.why for line in capture(namespace).omitted}
    assert lines == {
        "plain": "a socket",
        "server": "server.sock: a socket",
        "table": "table['a'][1][0]: a socket",
        "closure": "closure's sock: a socket",
        "held": "held['x']: a generator",
        "array": "array.flat[1]: a socket",
    }


def test_omitted_variable_takes_nothing_with_it(sock: socket.socket) -> None:
    shared, big = [1], np.zeros(100_000)
    namespace = {
        "first": {"list": shared, "big": big, "sock": sock},
        "second": {"list": shared, "big": big},
        "third": [shared, big[5:]],
    }
    captured = capture(namespace)
    assert [item.name for item in captured.saved] == ["second", "third"]
    assert len(captured.buffers) == 1
    after = again(captured).namespace
    assert after["second"]["list"] is after["third"][0]
    after["second"]["big"][6] = 3
    assert after["third"][1][1] == 3


def test_many_omissions_in_any_order(sock: socket.socket) -> None:
    draw, shared = random.Random(7), [0]
    namespace: dict[str, Any] = {}
    for index in range(200):
        bad = draw.random() < 0.3
        namespace[f"v{index}"] = [
            shared,
            ServerVariable(sock if bad else index),
            f"text {index % 9}",
        ]
    captured = capture(namespace)
    bad_names = {name for name, value in namespace.items() if value[1].sock is sock}
    assert {line.name for line in captured.omitted} == bad_names
    after = again(captured).namespace
    assert set(after) == set(namespace) - bad_names
    assert len({id(value[0]) for value in after.values()}) == 1
    assert all(value[1].sock == namespace[name][1].sock for name, value in after.items())


def test_autograd_graphs_are_named() -> None:
    leaf = torch.ones(2, requires_grad=True)
    captured = capture({"leaf": leaf, "loss": leaf.sum(), "kept": {"outs": [leaf * 2]}})
    lines = {line.name: (line.why, line.partly) for line in captured.omitted}
    assert lines == {
        "loss": ("its value is saved, its autograd graph is not", True),
        "kept": ("kept['outs'][0]: its value is saved, its autograd graph is not", True),
    }
    after = again(captured).namespace
    assert after["leaf"].requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        after["loss"].backward()


def test_an_object_nested_too_deeply_is_named() -> None:
    chain: list[Any] = []
    for _ in range(5_000):
        chain = [chain]
    captured = capture({"chain": chain, "fine": 1})
    assert [line.name for line in captured.omitted] == ["chain"]
    assert again(captured).namespace == {"fine": 1}
    while chain:  # Python frees such an object recursively
        chain = chain.pop()


# ---------------------------------------------------------------- another environment


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that can be imported now, but not later."""
    (tmp_path / "passing.py").write_text(
        "class Thing:\n    def __init__(self, x): self.x = x\n"
        "class Base: pass\n"
        "def helper(): return 1\n"
        "def decorate(f):\n    def wrapper(): return f()\n    wrapper.__module__ = f.__module__\n"
        "    wrapper.__qualname__ = f.__qualname__\n    return wrapper\n"
        "class Touchy:\n"
        "    def __getstate__(self): return {'a': 1}\n"
        "    def __setstate__(self, state): raise OSError('not here')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("passing", None)


def forget(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (library / "passing.py").unlink()
    monkeypatch.delitem(sys.modules, "passing")


def test_missing_module_costs_what_needs_it(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = notebook(
        """
        import passing, numpy
        shared = [1]
        thing = passing.Thing(shared)
        class Own(passing.Base): pass
        own = Own()
        helper = passing.helper
        @passing.decorate
        def wrapped(): return 1
        deep = {'a': [passing.Thing(2)]}
        objects = numpy.array([passing.Thing(1), None], dtype=object)
        def uses(): return passing.helper()
        keeps = {'shared': shared}
        """
    )
    captured = capture(namespace)
    assert captured.omitted == []
    forget(library, monkeypatch)
    restored = again(captured)
    lost = {"passing", "thing", "Own", "own", "helper", "wrapped", "deep", "objects"}
    assert {problem.name for problem in restored.problems} == lost
    assert all("passing" in problem.why for problem in restored.problems)
    after = restored.namespace
    assert set(after) == {"numpy", "shared", "uses", "keeps"}
    assert after["keeps"]["shared"] is after["shared"]


def test_code_that_raises_costs_what_needs_it(library: Path) -> None:
    namespace = notebook(
        """
        import passing, numpy, torch
        class Own:
            def __init__(self, x): self.x = x
        shared = [Own(1)]
        before = numpy.arange(20_000.)
        broken = {'touchy': passing.Touchy(), 'shared': shared, 'new': (late := [5])}
        also = [broken['touchy']]
        after = before[5:]
        large = torch.ones(50_000)
        kept = [shared, late]
        def f(): return kept
        """
    )
    restored = again(capture(namespace))
    assert {problem.name: problem.why for problem in restored.problems} == {
        "broken": "OSError: not here",
        "also": "OSError: not here",
    }
    after = restored.namespace
    assert after["kept"][0] is after["shared"]
    assert after["kept"][1] is after["late"] == [5]
    assert isinstance(after["shared"][0], after["Own"])
    assert np.shares_memory(after["before"], after["after"])
    assert after["large"].sum() == 50_000
    assert after["f"]() is after["kept"]


def test_names_of_main_are_not_taken_from_this_process() -> None:
    class Odd:
        def __reduce__(self) -> str:
            return "odd"

    odd, main = Odd(), sys.modules["__main__"]
    Odd.__module__ = "__main__"
    main.odd = odd  # type: ignore[attr-defined]
    try:
        restored = again(capture({"odd": odd, "fine": 1}))
    finally:
        del main.odd
    assert restored.namespace == {"fine": 1}
    assert [problem.name for problem in restored.problems] == ["odd"]


@pytest.mark.parametrize(
    "stream", [b"", b"short", b"x" * 100, b"\x80\x05N." + b"\0" * 8 + b"SINGNS01"]
)
def test_damaged_stream_is_refused(stream: bytes) -> None:
    with pytest.raises(StoreError):
        restore(stream, [])


def test_refused_stream_leaves_the_namespace_as_it_was(tmp_path: Path) -> None:
    captured = capture(notebook("first = 1\nsecond = [2] * 10\nthird = 'x' * 50"))
    at = captured.stream.index(b"x" * 50)
    damaged = captured.stream[:at] + b"\xff" * 10 + captured.stream[at + 10 :]
    into = {"first": "kept", "mine": 1}
    with pytest.raises(StoreError):
        restore(damaged, [], into=into, instead_of=["mine"])
    assert into == {"first": "kept", "mine": 1}


def test_code_that_runs_meanwhile_sees_the_restored_variables() -> None:
    before = notebook(
        """
        class Thing:
            def __getstate__(self): return {}
            def __setstate__(self, state): self.seen = helper(scale)
        thing = Thing()
        def helper(x): return math.floor(x)
        import math
        scale = 2.5
        """
    )
    # Functions and modules are restored first, whatever the order of the cells; other variables are
    # available if they were made before.
    names = ["scale", "thing", "Thing", "helper", "math"]
    into: dict[str, Any] = {"__name__": "__main__", "scale": 99, "helper": None}
    captured = capture(before, names=names)
    assert [item.name for item in captured.saved] == names
    again(captured, into=into)
    assert into["thing"].seen == 2


# ---------------------------------------------------------------- memory


def test_big_memory_is_not_copied() -> None:
    array, tensor, small = np.zeros(1 << 27), torch.zeros(1 << 20), np.zeros(10)
    captured = capture({"array": array, "view": array[3:], "tensor": tensor, "small": small})
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in captured.buffers]
    assert addresses == [array.__array_interface__["data"][0], tensor.data_ptr()]
    assert len(captured.stream) < 5_000
    sizes = {item.name: item.bytes for item in captured.saved}
    assert sizes["array"] >= 1 << 30
    assert sizes["view"] < 500
    assert sizes["tensor"] >= 4 << 20


def test_small_memory_travels_in_the_stream() -> None:
    fits, does_not = np.zeros(BUFFER_BYTES - 1, "u1"), np.zeros(BUFFER_BYTES, "u1")
    captured = capture({"a": fits, "b": does_not})
    assert [view.nbytes for view in captured.buffers] == [BUFFER_BYTES]


class FakeDevice:
    """A device whose memory is the host's; `mine` has the storages that belong to it."""

    def __init__(self) -> None:
        self.content: dict[int, bytes] = {}
        self.mine: dict[int, int] = {}
        self.loaded: list[int] = []
        self.states: list[bytes] = [b"seed"]

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        number = 100 + len(self.mine)
        self.mine[tensor.untyped_storage()._cdata] = number
        self.content[number] = bytes(tensor.untyped_storage().tolist())
        return tensor

    def holds(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self.mine

    def number(self, storage: torch.UntypedStorage) -> int:
        return self.mine[storage._cdata]

    def read(self, storage: torch.UntypedStorage) -> bytes:
        return self.content[self.number(storage)]

    def load(self, number: int, nbytes: int) -> torch.UntypedStorage:
        self.loaded.append(number)
        assert len(self.content[number]) == nbytes
        return self.write(self.content[number])

    def write(self, content: bytes) -> torch.UntypedStorage:
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).untyped_storage()

    def rng_states(self) -> list[bytes]:
        return self.states

    def set_rng_states(self, states: Any) -> None:
        self.states = list(states)


def test_device_storages_are_saved_by_number() -> None:
    device = FakeDevice()
    weight, small = device.put(torch.arange(5000.0)), device.put(torch.ones(3))
    namespace = {
        "weight": torch.nn.Parameter(weight),
        "tied": weight[10:20],
        "small": small,
        "host": torch.zeros(2),
    }
    captured = capture(namespace, device)
    assert captured.storages == {100: 20_000}
    assert captured.buffers == []
    assert len(captured.stream) < 3_000
    after = again(captured, device).namespace
    assert device.loaded == [100]
    assert after["tied"][0] == 10
    with torch.no_grad():
        after["weight"][10] = 77
    assert after["tied"][0] == 77
    assert after["small"].tolist() == [1, 1, 1]


def test_device_storages_of_omitted_variables_are_not_requested(sock: socket.socket) -> None:
    device = FakeDevice()
    lost, kept = device.put(torch.zeros(5000)), device.put(torch.zeros(6000))
    captured = capture({"bad": [lost, sock], "good": kept}, device)
    assert captured.storages == {101: 24_000}


def test_tensors_of_a_device_that_is_not_there_are_named() -> None:
    device = FakeDevice()
    captured = capture({"x": device.put(torch.zeros(5000)), "y": [1]}, device)
    restored = again(captured)
    assert restored.namespace == {"y": [1]}
    assert "no device session" in restored.problems[0].why


# ---------------------------------------------------------------- files and memory maps


def test_file_that_is_gone_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text("one\ntwo\n")
    with path.open() as file:
        file.readline()
        captured = capture({"file": file, "both": (file, [1]), "fine": 1})
    path.unlink()
    restored = again(captured)
    assert restored.namespace == {"fine": 1}
    assert {problem.name for problem in restored.problems} == {"file", "both"}
    assert all("data.txt" in problem.why for problem in restored.problems)


def test_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    with path.open("w") as file:
        file.write("a long line")
        captured = capture({"file": file})
    path.write_text("short")
    restored = again(captured)
    assert "shorter" in restored.problems[0].why
    assert path.read_text() == "short"


def test_file_opened_for_writing_is_not_truncated(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    with path.open("w") as file:
        file.write("begin ")
        captured = capture({"file": file, "same": file})
        file.write("later")
    after = again(captured).namespace
    assert path.read_text() == "begin later"
    assert after["file"] is after["same"]
    with after["file"]:
        after["file"].write("AGAIN")
    assert path.read_text() == "begin AGAIN"


def test_mapped_file_that_changed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "map.dat"
    np.arange(1000.0).tofile(path)
    mapped = np.memmap(path, np.float64, "r")
    captured = capture({"mapped": mapped, "part": mapped[5:]})
    assert captured.buffers == []
    after = again(captured)
    assert after.problems == []
    assert np.shares_memory(after.namespace["mapped"], after.namespace["part"])
    np.arange(10.0).tofile(path)
    restored = again(captured)
    assert restored.namespace == {}
    assert {problem.name for problem in restored.problems} == {"mapped", "part"}
