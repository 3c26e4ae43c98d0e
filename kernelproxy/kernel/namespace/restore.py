"""Restoring a namespace in a process."""

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
from kernelproxy.kernel.namespace.types import DevicePart, Omission, RestoredNamespace

DAMAGED = "The saved namespace is damaged."

Buffer = bytes | bytearray | memoryview


def restore(
    stream: bytes,
    buffers: Sequence[Buffer],
    device: DevicePart | None = None,
    *,
    into: dict[str, Any] | None = None,
    instead_of: Iterable[str] = (),
) -> RestoredNamespace:
    """Rebuild a notebook's variables.

    This runs code from the stream, as with every pickle. A variable that cannot be restored is
    reported, and the others are restored. The other process's search path for modules is appended
    to this one's.

    Parameters
    ----------
    stream, buffers : bytes, sequence of bytes-like
        Result of `capture`. Buffers are copied, so they may be reused.
    device : DevicePart, optional
        Device session, with the content of the storages.
    into : dict of str to object, optional
        Globals for functions of the notebook, into which the variables are put; default: a new
        dictionary. Its other content stays.
    instead_of : iterable of str
        Variables that are removed from `into` first, so that no code that runs meanwhile sees
        them.

    Returns
    -------
    Restored
        The variables, and the problems with some of them.

    Raises
    ------
    StoreError
        If the stream is not valid, or damaged; then `into` is unchanged.
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
) -> RestoredNamespace:
    namespace = what.namespace
    found: list[tuple[Segment, Any]] = []
    problems: list[Omission] = []
    with rebuild.restoring(what), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = _SegmentReader(stream, buffers)
        for segment in segments:
            value = reader.read(segment)
            found.append((segment, value))
            if segment.group == "variable":
                namespace[segment.name] = value  # for code that later objects run
            # Without the duplicates of a second reading.
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
    return RestoredNamespace(variables, extra, problems)


class _SegmentReader:
    """Unpickler of segments, one after the other.

    The C unpickler cannot continue after an error. So after an error, a tolerant one reads that
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
        """Return the variable of a segment; segments must be read in their order.

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
        """Continue with the tolerant unpickler, at the beginning of a segment."""
        memo = self._unpickler.memo.copy()
        file = io.BytesIO(self._stream)
        file.seek(segment.offset)
        self._unpickler = Forgiving(file, buffers=self._buffers[segment.buffers :])
        self._unpickler.memo = {index: memo[index] for index in range(segment.memo)}

    def _load(self) -> Any:
        value = self._unpickler.load()
        self._unpickler.load()  # written to find out the memo's length
        return value

    def flaws(self) -> bool:
        """True if any object was not restored correctly."""
        return bool(self._unpickler.missing or getattr(self._unpickler, "broken", ()))

    def flaw(self, obj: Any) -> str | None:
        """Return what is wrong with an object, not counting the objects inside it."""
        if isinstance(obj, Placeholder) or (isinstance(obj, type) and issubclass(obj, Placeholder)):
            stand: Any = obj
            return f"it needs {stand.why}"
        if isinstance(self._unpickler, Forgiving) and id(obj) in self._unpickler.broken:
            return self._unpickler.broken[id(obj)][1]
        return None


def _without_flaws(
    found: list[tuple[Segment, Any]], reader: _SegmentReader, namespace: dict[str, Any]
) -> tuple[list[tuple[Segment, Any]], list[Omission]]:
    """Remove variables that contain an object which was not restored correctly."""
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
