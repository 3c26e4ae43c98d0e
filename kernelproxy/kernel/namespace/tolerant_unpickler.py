"""Unpicklers with which one broken variable does not affect the others.

Something that a stream needs may be missing in this environment. This shows in two ways: as a name
that cannot be found, which is replaced by a placeholder, or as code that raises. The C unpickler
cannot recover from the second; the Python unpickler here inserts a placeholder there, too, and
continues.
"""

from __future__ import annotations

import pickle
from typing import Any, ClassVar


class Missing(type):
    """Metaclass of placeholders for classes and functions that do not exist here."""

    why = ""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Placeholder(metaclass=Missing):
    """Placeholder for an object that cannot be made; accepts every operation of pickle."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Placeholder:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        """Ignore an item, as if appended to a list."""

    def extend(self, items: Any) -> None:
        """Ignore items, as if appended to a list."""

    def add(self, item: Any) -> None:
        """Ignore an item, as if added to a set."""


def missing(name: str, error: Exception) -> Missing:
    """Return a placeholder class for something that does not exist here."""
    why = f"{name}, which cannot be had here: {sentence(error)}"
    return Missing("Missing", (Placeholder,), {"why": why})


def sentence(error: Exception) -> str:
    """Return an error in one line."""
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class _Finding:
    """Lookup of classes and functions for both unpicklers."""

    #: Whether a placeholder was made for something that this environment lacks.
    missing = False

    def find_class(self, module: str, name: str) -> Any:
        """Called by pickle with the names of classes and functions."""
        try:
            # The notebook's own definitions in __main__ are saved by value. A lookup in __main__
            # would find an unrelated object of this process.
            if module != "__main__":
                return super().find_class(module, name)  # type: ignore[misc]
            error: Exception = AttributeError(f"{name!r} was not saved with the notebook")
        except Exception as other:
            error = other
        self.missing = True
        return missing(f"{module}.{name}", error)


class Unpickler(_Finding, pickle.Unpickler):
    """The C unpickler, with placeholders for names that cannot be found."""


class Forgiving(_Finding, pickle._Unpickler):
    """Unpickler that continues when making or completing an object raises."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]
    memo: dict[int, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Incomplete objects by their ids, each with the reason.
        self.broken: dict[int, tuple[Any, str]] = {}

    def _reduce(self) -> None:
        args = self.stack.pop()
        function = self.stack[-1]
        try:
            self.stack[-1] = function(*args)
        except Exception as error:
            self.stack[-1] = self._stand_in(function, args, error)
            if getattr(function, "__name__", "").endswith("_state"):  # see rebuild
                self.broken[id(args[0])] = args[0], sentence(error)

    def _new(self, keywords: bool) -> None:
        kwargs = self.stack.pop() if keywords else {}
        args = self.stack.pop()
        cls = self.stack[-1]
        try:
            self.stack[-1] = cls.__new__(cls, *args, **kwargs)
        except Exception as error:
            self.stack[-1] = self._stand_in(cls, args, error)

    def _stand_in(self, function: Any, args: Any, error: Exception) -> Any:
        """Return the replacement of a failed result: the placeholder that caused it, if any."""
        for operand in (function, *args):
            for part in operand if type(operand) is tuple else (operand,):
                if isinstance(part, Placeholder | Missing):
                    return part
        self.missing = True
        return missing(getattr(function, "__qualname__", "an object"), error)()

    dispatch[pickle.REDUCE[0]] = _reduce
    dispatch[pickle.NEWOBJ[0]] = lambda self: self._new(False)
    dispatch[pickle.NEWOBJ_EX[0]] = lambda self: self._new(True)

    # These pop their operands from the stack first, so that afterwards the object that they change
    # is on top of it, whether they succeeded or not.
    for _code in ("BUILD", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS"):
        _number = getattr(pickle, _code)[0]

        def _complete(self: Any, _load: Any = dispatch[_number]) -> None:
            try:
                _load(self)
            except Exception as error:
                self.broken[id(self.stack[-1])] = self.stack[-1], sentence(error)

        dispatch[_number] = _complete
