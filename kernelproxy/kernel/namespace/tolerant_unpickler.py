"""Unpicklers that do not let one variable take all others down.

What a stream needs and an environment does not have is met twice: as a name that cannot be found,
for which a placeholder is put, and as code that raises. The C unpickler is lost in the second
case; the one in Python here puts a placeholder there, too, and goes on.
"""

from __future__ import annotations

import pickle
from typing import Any, ClassVar


class Missing(type):
    """Class of classes that stand for classes and functions that are not there."""

    why = ""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Placeholder(metaclass=Missing):
    """Stands for an object that cannot be made; lets everything be done to it that pickle does."""

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
        """Take an item, as lists do."""

    def extend(self, items: Any) -> None:
        """Take items, as lists do."""

    def add(self, item: Any) -> None:
        """Take an item, as sets do."""


def missing(name: str, error: Exception) -> Missing:
    """Make a class that stands for something that is not there."""
    why = f"{name}, which cannot be had here: {sentence(error)}"
    return Missing("Missing", (Placeholder,), {"why": why})


def sentence(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class _Finding:
    """How both unpicklers look for classes and functions."""

    #: Whether something stands for what this environment does not have.
    missing = False

    def find_class(self, module: str, name: str) -> Any:
        """Called by pickle with the names of classes and functions."""
        try:
            # Of __main__ the notebook's own things are saved by value; what is looked for there
            # would be somebody else's.
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
    """An unpickler that goes on where making or completing an object raises."""

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
        """What takes the place of a result: what made the failure, if that was a placeholder."""
        for operand in (function, *args):
            for part in operand if type(operand) is tuple else (operand,):
                if isinstance(part, Placeholder | Missing):
                    return part
        self.missing = True
        return missing(getattr(function, "__qualname__", "an object"), error)()

    dispatch[pickle.REDUCE[0]] = _reduce
    dispatch[pickle.NEWOBJ[0]] = lambda self: self._new(False)
    dispatch[pickle.NEWOBJ_EX[0]] = lambda self: self._new(True)

    # These take their operands from the stack before they do anything, so that afterwards the
    # object that they were about is on top of it, whatever happened.
    for _code in ("BUILD", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS"):
        _number = getattr(pickle, _code)[0]

        def _complete(self: Any, _load: Any = dispatch[_number]) -> None:
            try:
                _load(self)
            except Exception as error:
                self.broken[id(self.stack[-1])] = self.stack[-1], sentence(error)

        dispatch[_number] = _complete
