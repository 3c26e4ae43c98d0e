"""Putting a namespace into a process."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from kernelproxy.common.errors import StoreError
from kernelproxy.kernel.namespace import rebuild
from kernelproxy.kernel.namespace.object_path import first
from kernelproxy.kernel.namespace.stream import PREAMBLE, Segment, split
from kernelproxy.kernel.namespace.tolerant_unpickler import Forgiving, Placeholder, Unpickler
from kernelproxy.kernel.namespace.types import DevicePart, Omission, Restored

DAMAGED = "The saved namespace is damaged."

Buffer = bytes | bytearray | memoryview


def restore(
    stream: bytes,
    buffers: Sequence[Buffer],
    device: DevicePart | None = None,
    *,
    into: dict[str, Any] | None = None,
    instead_of: Iterable[str] = (),
) -> Restored:
    """Make a notebook's variables again.

    This runs code: what the stream says, as with every pickle. A variable that cannot be restored
    is named, and the others are. Places where the other process looked for modules are looked at,
    too, after this one's own.

    Parameters
    ----------
    stream, buffers : bytes, sequence of bytes-like
        What `capture` returned. Buffers are copied from, so that they may be used again.
    device : DevicePart, optional
        The device session, with the content of the storages.
    into : dict of str to object, optional
        What functions of the notebook will have as their globals, and where the variables are
        put; otherwise a new one. What else it has stays.
    instead_of : iterable of str
        Variables that are taken out of `into` first, so that no code that runs meanwhile sees
        them.

    Returns
    -------
    Restored
        The variables, and what is wrong with some of them.

    Raises
    ------
    StoreError
        If the stream is not one, or damaged; `into` is as it was then.
    """
    namespace = {} if into is None else into
    segments, search = split(stream)
    sys.path += [place for place in search if place not in sys.path]
    before = dict(namespace)
    try:
        for name in instead_of:
            namespace.pop(name, None)
        return _restore(stream, buffers, segments, rebuild.Restoring(namespace, device))
    except BaseException:
        namespace.clear()
        namespace.update(before)
        raise


def _restore(
    stream: bytes, buffers: Sequence[Buffer], segments: list[Segment], what: rebuild.Restoring
) -> Restored:
    namespace = what.namespace
    found: list[tuple[Segment, Any]] = []
    problems: list[Omission] = []
    with rebuild.restoring(what), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = _Reader(stream, buffers)
        for segment in segments:
            value = reader.read(segment)
            found.append((segment, value))
            if segment.group == "variable":
                namespace[segment.name] = value  # for code that is run by what follows
            # Without those that a second reading has said again.
            notes = dict.fromkeys(what.notes)
            problems += [Omission(segment.name, note, partly=True) for note in notes]
            what.notes.clear()
        for complete in what.later:
            complete()
    if reader.flaws():
        found, flawed = _without_flaws(found, reader, namespace)
        for problem in flawed:
            namespace.pop(problem.name, None)
        problems += flawed
    variables = {segment.name: value for segment, value in found if segment.group == "variable"}
    extra = {segment.name: value for segment, value in found if segment.group == "extra"}
    return Restored(variables, extra, problems)


class _Reader:
    """Unpickles segments, one after the other.

    The C unpickler cannot go on behind an error. So where one occurs, a forgiving one reads that
    segment again and all that follow: slower, but only then.
    """

    def __init__(self, stream: bytes, buffers: Sequence[Buffer]) -> None:
        self._stream, self._buffers = stream, buffers
        self._unpickler: Unpickler | Forgiving = Unpickler(io.BytesIO(stream), buffers=buffers)
        try:
            for _ in range(PREAMBLE):
                self._unpickler.load()
        except Exception as error:
            raise StoreError(DAMAGED, "damaged") from error

    def read(self, segment: Segment) -> Any:
        """The variable of a segment; segments are read in their order.

        Raises
        ------
        StoreError
            If the stream is damaged.
        """
        try:
            try:
                return self._load()
            except Exception:
                if isinstance(self._unpickler, Forgiving):
                    raise
            self._forgive(segment)
            return self._load()
        except Exception as error:
            raise StoreError(DAMAGED, "damaged") from error

    def _forgive(self, segment: Segment) -> None:
        """Let the forgiving unpickler go on, at the beginning of a segment."""
        memo = self._unpickler.memo.copy()
        file = io.BytesIO(self._stream)
        file.seek(segment.offset)
        self._unpickler = Forgiving(file, buffers=self._buffers[segment.buffers :])
        self._unpickler.memo = {index: memo[index] for index in range(segment.memo)}

    def _load(self) -> Any:
        value = self._unpickler.load()
        self._unpickler.load()  # what the memo's length was read from
        return value

    def flaws(self) -> bool:
        """Whether anything is not as it was."""
        return bool(self._unpickler.missing or getattr(self._unpickler, "broken", ()))

    def flaw(self, obj: Any) -> str | None:
        """What is wrong with an object, not counting what it holds."""
        if isinstance(obj, Placeholder) or (isinstance(obj, type) and issubclass(obj, Placeholder)):
            stand: Any = obj
            return f"it needs {stand.why}"
        if isinstance(self._unpickler, Forgiving) and id(obj) in self._unpickler.broken:
            return self._unpickler.broken[id(obj)][1]
        return None


def _without_flaws(
    found: list[tuple[Segment, Any]], reader: _Reader, namespace: dict[str, Any]
) -> tuple[list[tuple[Segment, Any]], list[Omission]]:
    """Take out variables that hold something that is not as it was."""
    skip = {id(namespace), id(sys.modules)}
    skip |= {
        id(vars(module)) for module in list(sys.modules.values()) if hasattr(module, "__dict__")
    }
    whole, problems = [], []
    for segment, value in found:
        flaw = first(value, reader.flaw, skip)
        if flaw is None:
            whole.append((segment, value))
        else:
            problems.append(Omission(segment.name, flaw))
    return whole, problems
