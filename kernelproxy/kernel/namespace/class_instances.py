"""Instances of classes that cells define, where pickle would run the class' own code too early.

pickle makes an object by calling its class, fills containers through their methods, and looks up
``__setstate__`` on the object before it has any attributes. Classes that do not expect this fail
then: a ``__new__`` or ``__init__`` with arguments, a ``__setitem__`` that counts, a ``__getattr__``
that uses another attribute. Here objects are made and filled by the methods of their built-in base
classes.
"""

from __future__ import annotations

import copyreg
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from kernelproxy.kernel.namespace import rebuild
from kernelproxy.kernel.namespace.types import Reduced

_CONTAINERS = (dict, list, set, frozenset, deque)
_METHODS = ("__new__", "__init__", "__getattr__", "__getattribute__")
_OWN = types.FunctionType  # type of methods that are written in Python


def rule(kind: type) -> Callable[[Any], Any] | None:
    """Return the reducer for objects of a type, or None if pickle's default is right for them."""
    reduce_ex: Any = kind.__reduce_ex__
    if kind.__module__ != "__main__" or reduce_ex is not object.__reduce_ex__:
        return None
    reducer = next(base for base in kind.__mro__ if "__reduce__" in vars(base))
    has = {name for name in _METHODS if isinstance(getattr(kind, name, None), _OWN)}
    if reducer is object:
        if has - {"__init__"} or issubclass(kind, _CONTAINERS):
            return _plain
    elif reducer.__module__ != "__main__" and has & {"__new__", "__init__"}:

        def of_base(obj: Any) -> Reduced | Any:
            return _of_base(obj, reducer)

        return of_base
    return None


def _plain(obj: Any) -> Reduced | Any:
    """Reduce an object that pickle would make by ``cls.__new__(cls)``."""
    kind = type(obj)
    found = obj.__reduce_ex__(5)
    if found[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
        return found
    if isinstance(getattr(kind, "__getnewargs__", None), _OWN):
        return found  # the class itself defines the arguments of its __new__
    return rebuild.bare, found[1], _content(obj, *found[2:]), None, None, rebuild.instance_state


def _of_base(obj: Any, base: type) -> Reduced | Any:
    """Reduce an object whose built-in base class would make pickle call the class."""
    found = obj.__reduce_ex__(5)
    if found[0] is not type(obj):
        return found
    made = (found[0], base, found[1])
    return rebuild.by_base, made, _content(obj, *found[2:]), None, None, rebuild.instance_state


def _content(obj: Any, state: Any = None, items: Any = None, pairs: Any = None) -> Any:
    """Return the content with which `rebuild.instance_state` fills an object."""
    if pairs is not None:
        basis = OrderedDict if isinstance(obj, OrderedDict) else dict
        pairs = list(basis.items(obj))
    return state, None if items is None else list(items), pairs
