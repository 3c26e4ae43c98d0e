"""Capturing a namespace in a process."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import sys
import types
import warnings
from collections.abc import Iterable
from typing import Any

import cloudpickle

from kernelproxy.kernel.namespace import rebuild, reducers
from kernelproxy.kernel.namespace.arrays import Arrays, Block
from kernelproxy.kernel.namespace.code import Code, Stand
from kernelproxy.kernel.namespace.memory_ranges import Memory
from kernelproxy.kernel.namespace.object_path import path_to
from kernelproxy.kernel.namespace.stream import Segment, join
from kernelproxy.kernel.namespace.tensors import Tensors
from kernelproxy.kernel.namespace.types import (
    BUFFER_BYTES,
    Captured,
    DevicePart,
    Extra,
    Item,
    Omission,
    Reduced,
)

#: Maximum number of lines about one variable; more would not help.
NOTES_MAX = 3


def capture(
    namespace: dict[str, Any],
    device: DevicePart | None = None,
    *,
    names: Iterable[str] | None = None,
    extra: Extra | None = None,
) -> Captured:
    """Save the variables of a notebook.

    They are saved as one graph: what two variables share, they share after `restore`. A variable
    that contains something that cannot be saved is left out as a whole, and named; the others are
    not affected. Nothing is changed, except that files opened for writing are flushed.

    Parameters
    ----------
    namespace : dict of str to object
        Globals of the notebook. Functions with these globals refer to those of `restore` later.
    device : DevicePart, optional
        Device session, for tensors on it.
    names : iterable of str, optional
        Variables to save; default: all but those with double underscores.
    extra : dict of str to object, optional
        Saved beside them in the same graph.

    Returns
    -------
    Captured
        What was saved, and what was not. Its buffers are views of the variables' memory.

    Raises
    ------
    KeyboardInterrupt
        If the user interrupts it; then nothing has been changed.
    """
    if names is None:
        names = [name for name in namespace if not name.startswith("__")]
    names = list(names)
    work = _Capture(namespace, device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of objects that are only inspected
            for name in sorted(names, key=lambda name: _turn(namespace[name])):
                work.add("variable", name, namespace[name])
            for name, value in (extra or {}).items():
                work.add("extra", name, value)
        return work.result([*names, *(extra or ())])
    finally:
        work.close()


def _turn(value: Any) -> int:
    """Return a variable's order: first what code may need that runs while others are restored."""
    if isinstance(value, types.ModuleType):
        return 0
    return 1 if isinstance(value, type | types.FunctionType) else 2


class _Capture:
    """State of one capture: a pickler, and what it has saved so far."""

    def __init__(self, namespace: dict[str, Any], device: DevicePart | None) -> None:
        self._namespace = namespace
        self._file = io.BytesIO()
        self._buffers: list[memoryview] = []
        self._notes: list[tuple[Any, str]] = []
        self._pickler = GraphPickler(self._file, namespace, device, self._keep, self._note)
        self._segments: list[Segment] = []
        self._saved: list[Item] = []
        self._omitted: list[Omission] = []
        self._skip = {id(namespace), id(sys.modules)}
        self._pickler.meet(namespace.values())
        self._memo = self._pickler.preamble([namespace, sys.modules, sys.path])

    def add(self, group: str, name: str, value: Any) -> None:
        """Save a variable; if that fails, record it and roll back."""
        segment = Segment(group, name, self._file.tell(), len(self._buffers), self._memo)
        numbers = self._pickler.numbers
        numbered = len(numbers)
        self._notes.clear()
        try:
            self._pickler.dump(value)
        except Exception as error:
            self._omitted.append(Omission(name, self._explain(name, value, error)))
            self._roll_back(segment, numbered)
            return
        self._memo = self._pickler.memo_length()
        self._segments.append(segment)
        beside = sum(view.nbytes for view in self._buffers[segment.buffers :])
        there = sum(nbytes for _, nbytes in numbers[numbered:])
        nbytes = self._file.tell() - segment.offset + beside + there
        self._saved.append(Item(name, type(value).__name__, nbytes))
        self._add_notes(name, value)

    def result(self, order: list[str]) -> Captured:
        """Return what was saved, sorted by `order`: the names in the user's order."""
        place = {name: index for index, name in enumerate(order)}
        self._saved.sort(key=lambda item: place[item.name])
        self._omitted.sort(key=lambda line: place[line.name])
        storages = dict(self._pickler.numbers)
        stream = join(self._file.getvalue(), self._segments, [os.fspath(p) for p in sys.path if p])
        return Captured(stream, self._buffers, storages, self._saved, self._omitted)

    def close(self) -> None:
        """Release the variables at once, instead of at the next garbage collection."""
        self._pickler.clear_memo()
        del self._pickler

    def _roll_back(self, to: Segment, numbered: int) -> None:
        self._file.seek(to.offset)
        self._file.truncate()
        del self._buffers[to.buffers :]
        del self._pickler.numbers[numbered:]
        self._pickler.forget(to.memo)

    def _explain(self, name: str, value: Any, error: Exception) -> str:
        offender = self._pickler.last
        what = reducers.describe(offender, error)
        try:
            path = path_to(offender, name, value, self._skip)
        except Exception:  # users' classes may do anything when they are inspected
            path = None
        if path == name:
            return what
        return f"{path}: {what}" if path else f"it holds {what}"

    def _add_notes(self, name: str, value: Any) -> None:
        for of, text in self._notes[:NOTES_MAX]:
            try:
                path = path_to(of, name, value, self._skip) or name
            except Exception:
                path = name
            why = text if path == name else f"{path}: {text}"
            self._omitted.append(Omission(name, why, partly=True))
        if (more := len(self._notes) - NOTES_MAX) > 0:
            self._omitted.append(Omission(name, f"and {more} more like that", partly=True))

    def _keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Called by pickle with memory; return True to put it into the stream."""
        raw = buffer.raw()
        if raw.nbytes < BUFFER_BYTES:
            return True
        self._buffers.append(raw)
        return False

    def _note(self, of: Any, text: str) -> None:
        self._notes.append((of, text))


class GraphPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler of several objects into one graph, which can remove the last one again.

    Parameters
    ----------
    file : BytesIO
        File to write to.
    namespace : dict
        Globals of the notebook.
    device : DevicePart or None
        The device session.
    keep, note : callable
        Called with buffers, and with notes about parts of saved objects that are not saved.
    """

    memo: Any  # of the C pickler; neither it nor cloudpickle declares it

    def __init__(
        self, file: io.BytesIO, namespace: dict[str, Any], device: DevicePart | None,
        keep: Any, note: Any,
    ) -> None:  # fmt: skip
        super().__init__(file, protocol=5, buffer_callback=keep)
        self._file = file
        self._rules: dict[type, Any] = {}
        self._known: dict[type, dict[int, tuple[str, str]]] = {}
        for obj, *place in reducers.known_objects():
            self._known.setdefault(type(obj), {})[id(obj)] = (place[0], place[1])
        #: The object that was reduced last: the offender, if pickling fails.
        self.last: Any = None
        memory = Memory()
        self._note = note
        self._code = Code(namespace, note)
        self._arrays = Arrays(memory) if "numpy" in sys.modules else None
        torch = sys.modules.get("torch")
        whole = torch is not None and hasattr(torch, "Tensor")  # its import may have failed
        self._tensors = Tensors(memory, device, note) if whole else None
        #: Device storages seen so far, with their bytes.
        self.numbers = self._tensors.numbers if self._tensors else []

    def meet(self, values: Iterable[Any]) -> None:
        """Register arrays before anything is saved.

        A tensor may use a part of an array's memory; if it came first, it would be taken for the
        owner.
        """
        for value in values:
            if self._arrays is not None and type(value) is self._arrays.plain:
                self._arrays.meet(value)

    def preamble(self, known: list[Any]) -> int:
        """Begin the stream with objects that pickle would take apart; return the memo's length.

        Pickle does not call reducers for dictionaries and lists, but refers to objects in the memo.
        So these objects are put into the memo, in place of what rebuilds them.
        """
        stands = [
            Stand(rebuild.namespace, ()),
            Stand(rebuild.known, ("sys", "modules")),
            Stand(rebuild.known, ("sys", "path")),
        ]
        for stand, of in zip(stands, known, strict=True):
            self.dump(stand)
            memo = self.memo.copy()
            memo[id(of)] = (memo.pop(id(stand))[0], of)
            self.memo = memo
        return self.memo_length()

    def memo_length(self) -> int:
        """Return the number of entries in the memo, which the C pickler does not expose.

        A new object twice in a row is written as itself and a reference by number.
        """
        begin, fresh = self._file.tell(), list[Any]()
        self.dump((fresh, fresh))
        written = bytes(self._file.getbuffer()[begin:])
        codes = pickletools.genops(written)
        numbers = [number for code, number, _ in codes if code.name in ("BINGET", "LONG_BINGET")]
        return int(numbers[0] or 0) + 2  # itself, and the pair

    def forget(self, length: int) -> None:
        """Remove objects from the memo that were added after it had this length."""
        memo = self.memo.copy()
        self.memo = {key: entry for key, entry in memo.items() if entry[0] < length}
        self.last = None

    def reducer_override(self, obj: Any) -> Any:
        """Called by pickle with each object that is not of one of its built-in types."""
        self.last = obj
        kind = type(obj)
        rule = self._rules.get(kind)
        if rule is None:
            rule = self._rules[kind] = self._rule(kind)
        return rule(obj)

    def _rule(self, kind: type) -> Any:
        rule = (
            self._code.rule(kind)
            or (self._arrays and (self._arrays.block if kind is Block else self._arrays.rule(kind)))
            or (self._tensors and self._tensors.rule(kind))
            or reducers.rule(kind, self._note)
            or super().reducer_override
        )
        known = self._known.get(kind)
        if known is None:
            return rule

        def by_name_or(obj: Any) -> Reduced | Any:
            place = known.get(id(obj))
            return (rebuild.known, place) if place is not None else rule(obj)

        return by_name_or
