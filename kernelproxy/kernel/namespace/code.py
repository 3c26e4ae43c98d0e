"""Functions and classes that cells define: saved by value, with the restored namespace as globals.

cloudpickle takes them apart. But it gives functions a private copy of the globals that they use and
cells of their own, and it saves only a part of enumerations and classes. Here everything is shared
and complete after a restore.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from cloudpickle import cloudpickle as internals

from kernelproxy.kernel.namespace import rebuild
from kernelproxy.kernel.namespace.types import Reduced, Unsaveable


class Stand:
    """Placeholder in the stream for what pickle would take apart, or what is not an object."""

    def __init__(self, *reduced: Any) -> None:
        self._reduced = reduced

    def __reduce__(self) -> Reduced:
        return self._reduced


class Code:
    """Reduces functions, classes and modules for one capture.

    Parameters
    ----------
    namespace : dict
        Namespace that is captured: the globals of functions of cells.
    note : callable
        Called with an object and a line about a part of it that is not saved.
    """

    def __init__(self, namespace: Mapping[str, object], note: Callable[[Any, str], None]) -> None:
        self._namespace, self._note = namespace, note
        # By id; with the object, to keep it alive.
        self._stands: dict[int, tuple[Any, Stand]] = {}
        self._private: dict[int, tuple[Any, dict[str, Any]]] = {}

    def rule(self, kind: type) -> Any:
        """Return the reducer for objects of a type, or None if it is not code."""
        if kind is types.FunctionType:
            return self._function
        if issubclass(kind, type):
            return self._class
        if issubclass(kind, types.ModuleType):
            return self._module
        if kind is functools._lru_cache_wrapper:
            return self._lru_cache
        if kind is typing.NewType:
            return self._new_type
        if kind.__module__ == "typing" and kind.__name__ in ("ParamSpec", "TypeVarTuple"):
            return self._type_parameter
        return None

    def _function(self, function: types.FunctionType) -> Reduced | Any:
        if internals._should_pickle_by_reference(function):
            return NotImplemented
        if (place := _place(function)) is not None:
            return rebuild.known, place
        attributes, slots = internals._function_getstate(function)
        where, used = self._globals(function), slots.pop("__globals__")
        if where is not None:
            used = {}
        else:  # globals that belong to no module: save only what is used
            own = {name: used.get(name) for name in ("__name__", "__package__", "__file__")}
            _, where = self._private.setdefault(id(function.__globals__), (function, own))
        for name in ("__closure__", "_cloudpickle_submodules"):
            slots.pop(name, None)
        cells = function.__closure__
        contents = [_content(cell) for cell in cells or ()]
        closure = cells and tuple[Any, ...](self._stand(cell, types.CellType) for cell in cells)
        state = (attributes, slots, contents, used)
        made = (function.__code__, where, None, None, closure)
        return types.FunctionType, made, state, None, None, rebuild.function_state

    def _globals(self, function: types.FunctionType) -> Any:
        """Return a placeholder for a function's globals, or None if they must be copied.

        The globals of a module on disk are those of the module. They must not be copied: a
        library's decorator may keep a registry there.
        """
        where = function.__globals__
        if where is self._namespace:
            return where
        name = where.get("__name__")
        module = sys.modules.get(name) if isinstance(name, str) else None
        if module is None or vars(module) is not where or not _importable(module):
            return None
        return self._stand(module, rebuild.module_dict, name)

    def _stand(self, of: Any, *reduced: Any) -> Stand:
        """Return the placeholder for an object, always the same one."""
        if id(of) not in self._stands:
            self._stands[id(of)] = of, Stand(reduced[0], reduced[1:])
        return self._stands[id(of)][1]

    def _class(self, cls: Any) -> Reduced | Any:
        found = internals._class_reduce(cls)
        if found is NotImplemented or found[0] not in (
            internals._make_skeleton_class,
            internals._make_skeleton_enum,
        ):
            return found
        if (place := _place(cls)) is not None:
            return rebuild.known, place
        _refuse_built_in(cls)
        state = found[2]
        attributes = state[0]
        for name, value in list(attributes.items()):
            # Descriptors of slots, also of those with private names: __slots__ creates them again.
            if isinstance(value, types.MemberDescriptorType) and value.__objclass__ is cls:
                del attributes[name]
        if issubclass(cls, enum.Enum):
            return self._enum(cls, state)
        _, name, bases, body, *_ = found[1]
        body = {**body, "__qualname__": cls.__qualname__}
        if issubclass(cls, tuple) and hasattr(cls, "_fields"):
            bases = cls.__bases__  # typing.NamedTuple would make another class of this body
        if "__slots__" in vars(cls):
            body["__slots__"] = vars(cls)["__slots__"]
            attributes.pop("__slots__", None)
        # Without cloudpickle's tracking id, by which a process would return the class that it has:
        # what is restored must be what was saved, not a later version.
        made = (type(cls), name, bases, body, None, None)
        return internals._make_skeleton_class, made, state, None, None, rebuild.class_state

    def _enum(self, cls: Any, state: Any) -> Reduced:
        members = {name: member._value_ for name, member in cls.__members__.items()}
        for name in members:
            state[0].pop(name, None)
        for name in ("_unhashable_values_", "_hashable_values_", "_unhashable_values_map_"):
            state[0].pop(name, None)
        ours = {"_value_", "_name_", "__objclass__", "_sort_order_"}
        state[0]["__sing_members__"] = {
            name: {k: v for k, v in vars(member).items() if k not in ours}
            for name, member in cls.__members__.items()
        }
        made = (cls.__bases__, cls.__name__, cls.__qualname__, members, cls.__module__)
        return rebuild.enum_class, made, state, None, None, rebuild.class_state

    def _module(self, module: types.ModuleType) -> Reduced:
        if vars(module) is self._namespace:
            return rebuild.module, ("__main__",)
        if _importable(module):
            return rebuild.module, (module.__name__,)
        state = {name: value for name, value in vars(module).items() if name != "__builtins__"}
        return rebuild.made_module, (module.__name__,), state, None, None, rebuild.made_module_state

    def _lru_cache(self, function: Any) -> Reduced | Any:
        if internals._lookup_module_and_qualname(function, function.__qualname__) is not None:
            return NotImplemented
        if function.cache_info().currsize:
            self._note(function, "it is saved, what it has cached is not")
        how = function.cache_parameters()
        made = (function.__wrapped__, how["maxsize"], how["typed"])
        return rebuild.lru_cache, made, vars(function)

    def _new_type(self, new: Any) -> Reduced | Any:
        if internals._lookup_module_and_qualname(new, new.__name__) is not None:
            return NotImplemented
        return rebuild.new_type, (new.__name__, new.__supertype__, new.__module__)

    def _type_parameter(self, parameter: Any) -> Reduced | Any:
        if internals._lookup_module_and_qualname(parameter, parameter.__name__) is not None:
            return NotImplemented
        made = (type(parameter).__name__, parameter.__name__, parameter.__module__)
        return rebuild.type_parameter, made


def _refuse_built_in(cls: Any) -> None:
    """Refuse a class that is not written in Python: it cannot be rebuilt from its attributes.

    Raises
    ------
    Refused
        If it is such a class.
    """
    if type(cls).__module__ == "_ctypes":
        raise Unsaveable("a type of ctypes")
    own = (types.MethodDescriptorType, types.WrapperDescriptorType)
    if any(isinstance(value, own) and value.__objclass__ is cls for value in vars(cls).values()):
        raise Unsaveable(f"the built-in type {cls.__name__}")


def _place(code: Any) -> tuple[str, str] | None:
    """Return the place of a class or function whose module a library imports on first use, or None.

    Examples are NumPy's ``rec`` and ``char``. cloudpickle searches imported modules only.
    """
    module, name = code.__module__, code.__qualname__
    if not isinstance(module, str) or module in sys.modules or "<locals>" in name:
        return None
    if module.partition(".")[0] not in sys.modules:
        return None
    try:
        return (module, name) if rebuild.known(module, name) is code else None
    except Exception:  # it does not exist, or its import fails
        return None


def _importable(module: types.ModuleType) -> bool:
    """True if a module can be imported by its name, here and elsewhere."""
    if module.__name__ == "__main__" or sys.modules.get(module.__name__) is not module:
        return False
    return bool(internals._should_pickle_by_reference(module))


def _content(cell: types.CellType) -> tuple[Any, ...]:
    """Return the content of a cell, or nothing."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()
