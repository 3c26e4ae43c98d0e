"""Path of an object inside a variable, as in code: ``server.pool[2].sock``."""

from __future__ import annotations

import copyreg
import functools
import gc
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

#: Limit of a search; if it is reached, the message names the variable alone.
OBJECTS_MAX = 500_000
INSIDE = "'s inside"


def path_to(target: Any, name: str, value: Any, skip: set[int]) -> str | None:
    """Return the shortest path from a variable to an object.

    Parameters
    ----------
    target : object
        Object to search for.
    name, value : str, object
        The variable.
    skip : set of int
        Ids of objects that are not searched, such as the namespace itself.

    Returns
    -------
    str or None
        The path, or None if none is found.
    """
    if value is target:
        return name
    seen, waiting = {id(value), *skip}, deque([(name, value)])
    keep = []  # objects made by the search stay alive, so that their ids are not reused
    while waiting and len(seen) < OBJECTS_MAX:
        path, obj = waiting.popleft()
        for step, child in _children(obj):
            # Names below the surface of an object would not help users.
            if path.endswith(INSIDE):
                step = ""
            if child is target:
                return path + step
            if id(child) not in seen:
                seen.add(id(child))
                keep.append(child)
                if not isinstance(child, str | bytes | int | float | bool | types.ModuleType):
                    waiting.append((path + step, child))
    return None


def first(value: Any, what: Callable[[Any], str | None], skip: set[int]) -> str | None:
    """Return the first result of `what` that is not None, for all objects inside a value."""
    seen, waiting = {id(value), *skip}, [value]
    while waiting:
        obj = waiting.pop()
        if (answer := what(obj)) is not None:
            return answer
        if isinstance(obj, types.ModuleType) or (
            isinstance(obj, type) and obj.__module__ != "__main__"
        ):
            continue
        children = gc.get_referents(obj)
        if _is_array_of_objects(obj):
            children += obj.ravel().tolist()
        for child in children:
            if id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return None


def _children(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects inside an object, with the expression that leads to each."""
    if isinstance(obj, types.FunctionType):
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
            try:
                yield f"'s {name}", cell.cell_contents
            except ValueError:
                continue
        for index, value in enumerate(obj.__defaults__ or ()):
            yield f"'s default {index}", value
        for name, value in (obj.__kwdefaults__ or {}).items():
            yield f"'s default {name}", value
    elif isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
        yield ".__func__", obj.__func__
    elif isinstance(obj, functools.partial):
        yield ".func", obj.func
        yield from ((f".args[{index}]", value) for index, value in enumerate(obj.args))
        yield from ((f".keywords[{name!r}]", value) for name, value in obj.keywords.items())
    elif isinstance(obj, type):
        if obj.__module__ != "__main__":
            return
        yield from ((f".{base.__name__}", base) for base in obj.__bases__)
    if isinstance(obj, dict):
        for key, value in obj.items():
            yield f"[{_short(key)}]", value
            yield f".keys() {_short(key)}", key
    elif isinstance(obj, list | tuple | deque):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    elif isinstance(obj, set | frozenset):
        yield from ((f" item {_short(value)}", value) for value in obj)
    elif _is_array_of_objects(obj):
        yield from ((f".flat[{index}]", value) for index, value in enumerate(obj.ravel().tolist()))
    attributes = getattr(obj, "__dict__", None)
    if isinstance(attributes, dict | types.MappingProxyType):
        yield from ((f".{name}", value) for name, value in list(attributes.items()))
    if not isinstance(obj, type):
        for name in copyreg._slotnames(type(obj)):  # type: ignore[attr-defined]
            if hasattr(obj, name):
                yield f".{name}", getattr(obj, name)
    if attributes is None and not isinstance(obj, dict | list | tuple | set | frozenset):
        yield from ((INSIDE, value) for value in gc.get_referents(obj))


def _short(key: Any) -> str:
    """Return a key as in code, if that is short."""
    if isinstance(key, str | int | float | bytes | bool | None) and len(repr(key)) <= 40:
        return repr(key)
    return f"a {type(key).__name__}"


def _is_array_of_objects(obj: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(obj, numpy.ndarray) and bool(obj.dtype.hasobject)
