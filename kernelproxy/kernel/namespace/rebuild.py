"""Functions that streams call to rebuild objects.

Streams contain the names of these functions, so a function here keeps its name and its parameters,
or stays beside its successor: checkpoints live longer than versions of this package.
"""

from __future__ import annotations

import enum
import functools
import importlib
import io
import logging
import os
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kernelproxy.common.errors import InternalError
from kernelproxy.kernel.namespace.memory_ranges import fill
from kernelproxy.kernel.namespace.types import DevicePart


class Restoring:
    """State of the restore in progress.

    Parameters
    ----------
    namespace : dict
        Globals of functions that were defined in cells.
    device : DevicePart or None
        Device session.
    """

    def __init__(self, namespace: dict[str, Any], device: DevicePart | None) -> None:
        self.namespace, self.device = namespace, device
        #: Device storages by number: one that is read twice is loaded once.
        self.storages: dict[int, Any] = {}
        #: Functions that must run after all objects are made.
        self.later: list[Callable[[], object]] = []
        #: Notes about the variable that is being restored.
        self.notes: list[str] = []


_current: Restoring | None = None


@contextmanager
def restoring(what: Restoring) -> Iterator[None]:
    """Set the restore for which this module's functions work."""
    global _current
    before, _current = _current, what
    try:
        yield
    finally:
        _current = before


def _now() -> Restoring:
    if _current is None:
        raise InternalError("a stream was unpickled by other means than restore()")
    return _current


# ---------------------------------------------------------------- by reference


def namespace() -> dict[str, Any]:
    """Return the namespace itself, for objects that refer to `globals()`."""
    return _now().namespace


def known(module: str, path: str) -> Any:
    """Return an object of which every process has its own, such as ``sys.stdout``."""
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def shell() -> Any:
    """Return the shell of this kernel."""
    found = importlib.import_module("IPython").get_ipython()
    if found is None:
        raise RuntimeError("this process has no IPython shell")
    return found


def module(name: str) -> types.ModuleType:
    """Return an imported module."""
    return importlib.import_module(name)


def module_dict(name: str) -> dict[str, Any]:
    """Return the globals of a module's functions."""
    return vars(importlib.import_module(name))


def made_module(name: str) -> types.ModuleType:
    """Return a module that was made by code; filled by `made_module_state`."""
    return types.ModuleType(name)


def made_module_state(made: types.ModuleType, state: dict[str, Any]) -> None:
    """Fill a module that was made by code."""
    vars(made).update(state)


# ---------------------------------------------------------------- functions and classes


def function_state(function: types.FunctionType, state: tuple[Any, ...]) -> None:
    """Complete a function: set its attributes and the content of its free variables."""
    attributes, slots, contents, used = state
    vars(function).update(attributes)
    function.__globals__.update(used)
    for cell, content in zip(function.__closure__ or (), contents, strict=True):
        if content:  # cells shared by two functions are filled twice, with the same content
            cell.cell_contents = content[0]
    for name, value in slots.items():
        setattr(function, name, value)


#: Hooks that run when a class is created. They ran when the cell was executed, and their effects
#: (entries in registries, for example) are part of the restored state.
_HOOKS = {"__init_subclass__"}
_METACLASS_HOOKS = {"__new__", "__init__", "__call__", "__prepare__", "__setattr__"}


def class_state(cls: type, state: Any) -> None:
    """Complete a class; its hooks take effect when everything is restored."""
    attributes = state[0]
    hooks = _HOOKS | _METACLASS_HOOKS if issubclass(cls, type) else _HOOKS
    waiting = {name: attributes.pop(name) for name in hooks & set(attributes)}
    members = attributes.pop("__sing_members__", {})
    # Use type's own method, since a metaclass may do more than assign.
    registered = attributes.pop("_abc_impl", ())
    for name, value in attributes.items():
        type.__setattr__(cls, name, value)
    for name, value in members.items():
        vars(cls.__members__[name]).update(value)  # type: ignore[attr-defined]
    for subclass in registered:
        cls.register(subclass)  # type: ignore[attr-defined]
    if waiting:
        _now().later.append(
            lambda: [type.__setattr__(cls, name, value) for name, value in waiting.items()]
        )


def bare(cls: type, *args: Any) -> Any:
    """Return an object of a class, made without running code of that class."""
    for base in cls.__mro__:
        new = vars(base).get("__new__")
        if new is not None and not isinstance(new, staticmethod | types.FunctionType):
            return new(cls, *args)
    raise InternalError(f"{cls.__name__} has no __new__ of its own or inherited")


def by_base(cls: type, base: Any, args: tuple[Any, ...]) -> Any:
    """Return an object of a class, made in the same way as objects of its base class."""
    made = base.__new__(cls, *args)
    if base.__init__ is not object.__init__:
        base.__init__(made, *args)
    return made


def instance_state(made: Any, content: tuple[Any, ...]) -> None:
    """Fill an object: items and attributes, by the methods of the built-in classes."""
    state, items, pairs = content
    if items is not None:
        extend = deque.extend if isinstance(made, deque) else list.extend
        extend(made, items)
    if pairs is not None:
        put: Any = OrderedDict.__setitem__ if isinstance(made, OrderedDict) else dict.__setitem__
        for key, value in pairs:
            put(made, key, value)
    own = getattr(type(made), "__setstate__", None)
    if state is not None and own is not None:
        own(made, state)
        return
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if attributes:
        object.__getattribute__(made, "__dict__").update(attributes)
    for name, value in (slots or {}).items():
        object.__setattr__(made, name, value)


def enum_class(
    bases: tuple[type, ...], name: str, qualname: str, members: dict[str, Any], module: str
) -> type:
    """Return an Enum with its members and their aliases."""
    metaclass: Any = type(bases[-1])
    body = metaclass.__prepare__(name, bases)
    for member, value in members.items():
        body[member] = value
    made: type = enum.EnumMeta.__new__(metaclass, name, bases, body)
    made.__module__, made.__qualname__ = module, qualname
    return made


def new_type(name: str, supertype: Any, module: str) -> Any:
    """Return a ``typing.NewType``."""
    import typing

    make: Any = typing.NewType
    made = make(name, supertype)
    made.__module__ = module
    return made


def type_parameter(kind: str, name: str, module: str) -> Any:
    """Return a ``typing.ParamSpec`` or ``TypeVarTuple``."""
    import typing

    made = getattr(typing, kind)(name)
    made.__module__ = module
    return made


def lru_cache(function: Any, maxsize: int | None, typed: bool) -> Any:
    """Return a function with a cache, which is empty."""
    return functools.lru_cache(maxsize, typed)(function)


def exception(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Return an exception, without running a constructor that a cell or a library defined."""
    made = cls.__new__(cls, *args)
    made.args = args
    return made


def exception_state(made: BaseException, state: dict[str, Any]) -> None:
    """Complete an exception; its traceback is not restored."""
    made.__cause__, made.__context__ = state["cause"], state["context"]
    made.__suppress_context__ = state["suppress"]
    vars(made).update(state["attributes"])


# ---------------------------------------------------------------- small things


def lock() -> Any:
    """Return a lock that is not held."""
    return threading.Lock()


def rlock() -> Any:
    """Return a reentrant lock that is not held."""
    return threading.RLock()


def dict_view(of: Any, method: str) -> Any:
    """Return the keys, values or items of a dictionary, as a view that follows its changes."""
    return getattr(of, method)()


def weak_dict(cls: type, items: list[tuple[Any, Any]]) -> Any:
    """Return a dictionary with weak keys or values; those without other references are lost."""
    made = cls()
    made.update(items)
    return made


def weak_set(items: list[Any]) -> Any:
    """Return a set of weak references."""
    return weakref.WeakSet(items)


def logger(name: str | None) -> logging.Logger:
    """Return a logger by its name."""
    return logging.getLogger(name)


def logger_state(made: logging.Logger, state: dict[str, Any]) -> None:
    """Set a logger's level and handlers to those of the notebook."""
    made.setLevel(state["level"])
    made.propagate, made.disabled = state["propagate"], state["disabled"]
    made.filters, made.handlers = state["filters"], state["handlers"]


def handler_state(made: logging.Handler, state: dict[str, Any]) -> None:
    """Complete a handler, and register it with the logging module as its constructor would."""
    vars(made).update(state)
    made.createLock()
    if state.get("_name"):
        made.name = state["_name"]
    logging._addHandlerRef(made)  # type: ignore[attr-defined]  # flushed when the process ends


# ---------------------------------------------------------------- open files


def raw_file(path: str, name: str, flags: int, mode: str, position: int) -> io.FileIO:
    """Reopen a file at its position, never truncated; `name` is the name it was opened by.

    Raises
    ------
    OSError
        If it does not exist.
    EOFError
        If it is shorter than the position.
    """
    fd = os.open(path, flags | os.O_CLOEXEC)
    file = io.FileIO(fd, mode)
    file.name = name
    if position > os.fstat(fd).st_size:
        file.close()
        raise EOFError(f"{path} is shorter than it was")
    file.seek(position)
    return file


def buffered_file(cls: Any, raw: io.FileIO, position: int) -> Any:
    """Return a buffer around a file."""
    file = cls(raw)
    file.seek(position)
    return file


def text_file(
    binary: Any, mode: str, encoding: str, errors: str, newline: str | None, how: tuple[bool, bool],
    cookie: int,
) -> io.TextIOWrapper:  # fmt: skip
    """Return a text file; `how`: line_buffering, write_through; `cookie`: from its ``tell``."""
    file = io.TextIOWrapper(binary, encoding, errors, newline, *how)
    file.mode = mode  # type: ignore[misc]
    if file.seekable() and not file.closed:
        file.seek(cookie)
    return file


def closed_file(kind: str, name: str, mode: str, encoding: str | None) -> Any:
    """Return a closed file that still has its name."""
    raw = io.FileIO(os.devnull, "r")
    raw.name = name
    made: Any = raw
    if kind != "FileIO":
        made = io.BufferedReader(raw)
    if kind == "TextIOWrapper":
        made = io.TextIOWrapper(made, encoding or "utf-8")
        made.mode = mode
    made.close()
    return made


# ---------------------------------------------------------------- NumPy


def array(content: Any, shape: tuple[int, ...], dtype: Any, order: str, writeable: bool) -> Any:
    """Return an array that owns its memory."""
    np: Any = importlib.import_module("numpy")
    made = np.empty(shape, dtype, order)
    fill(made.__array_interface__["data"][0], made.nbytes, content)
    if not writeable:
        made.flags.writeable = False
    return made


def window(
    owner: Any, offset: int, shape: tuple[int, ...], dtype: Any, strides: Any, writeable: bool
) -> Any:
    """Return an array in the memory of another object."""
    np: Any = importlib.import_module("numpy")
    torch = sys.modules.get("torch")
    base = owner
    if torch is not None and isinstance(owner, torch.UntypedStorage):
        base = torch.empty(0, dtype=torch.uint8, device="cpu").set_(owner).numpy()
    elif isinstance(owner, np.ndarray) and not owner.flags.c_contiguous:
        base = owner.T  # memory in Fortran order is the transpose in C order
    locked = isinstance(base, np.ndarray) and not base.flags.writeable and writeable
    if locked:  # the owner was made read-only after this view was made
        base.flags.writeable = owner.flags.writeable = True
        base = owner if owner.flags.c_contiguous else owner.T
    made = np.ndarray(shape, dtype, base, offset, strides)
    if locked:
        owner.flags.writeable = False
    if not writeable:
        made.flags.writeable = False
    return made


def window_of_objects(owner: Any, offset: int, shape: tuple[int, ...], strides: Any) -> Any:
    """Return a view of an array of objects."""
    np: Any = importlib.import_module("numpy")
    flat = (owner if owner.flags.c_contiguous else owner.T).reshape(-1)
    return np.lib.stride_tricks.as_strided(flat[offset // owner.itemsize :], shape, strides)


def subclass(plain: Any, cls: type, dtype: Any) -> Any:
    """Return an array of a subclass in the memory of a plain one."""
    np: Any = importlib.import_module("numpy")
    made = plain.view(cls)
    if made.dtype != dtype or type(made.dtype.type) is not type(dtype.type):
        made.dtype = dtype
    if cls is np.memmap and isinstance(plain.base, np.memmap):
        for name in ("_mmap", "filename", "offset", "mode"):
            setattr(made, name, getattr(plain.base, name))
    return made


def masked(data: Any, mask: Any) -> Any:
    """Return a masked array; others may share its data and mask."""
    np: Any = importlib.import_module("numpy")
    made = np.ma.MaskedArray(data, copy=False)
    made._mask = np.ma.nomask if mask is None else mask
    return made


def array_state(made: Any, state: dict[str, Any]) -> None:
    """Complete an array of a subclass."""
    if state:
        vars(made).update(state)


def mapped(path: str, offset: int, nbytes: int, size: int, changed: int) -> Any:
    """Return the bytes of a file, mapped for reading.

    Raises
    ------
    ValueError
        If the file's length has changed.
    """
    np: Any = importlib.import_module("numpy")
    now = os.stat(path)
    if now.st_size != size:
        raise ValueError(f"{path} has {now.st_size} bytes, and had {size}")
    if now.st_mtime_ns != changed:
        _now().notes.append(f"its file {path} was written since")
    return np.memmap(path, np.uint8, "r", offset, (nbytes,))


# ---------------------------------------------------------------- torch


def storage(content: Any, nbytes: int, shared: bool) -> Any:
    """Return a host storage of torch."""
    import torch

    made = torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
    fill(made.data_ptr(), nbytes, content)
    return made.share_memory_() if shared else made


def storage_in_array(owner: Any, offset: int, nbytes: int) -> Any:
    """Return a storage in the memory of a NumPy array, as ``torch.from_numpy`` makes it."""
    import torch

    flat = window(owner, offset, (nbytes,), "u1", (1,), True)
    return torch.from_numpy(flat).untyped_storage()


def storage_on_device(number: int, nbytes: int) -> Any:
    """Return a storage of the device session, from its snapshot.

    Raises
    ------
    RuntimeError
        If there is no device session.
    """
    storages = _now().storages
    if number not in storages:
        storages[number] = _device().load(number, nbytes)
    return storages[number]


def small_storage_on_device(content: bytes) -> Any:
    """Return a storage of the device session, from the stream.

    Raises
    ------
    RuntimeError
        If there is no device session.
    """
    return _device().write(bytes(content))


def typed_storage(untyped: Any, dtype: Any) -> Any:
    """Return a typed storage, as older code uses it."""
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def tensor(
    of: Any, dtype: Any, offset: int, size: Any, stride: Any, bits: dict[str, bool], kind: str
) -> Any:
    """Return a tensor; `kind` is ``tensor``, ``parameter`` or ``inference``."""
    import torch

    with torch.inference_mode(kind == "inference"):
        made = torch.empty(0, dtype=dtype, device=of.device)
        with torch.no_grad():
            made.set_(of, offset, size, stride)
        if bits:
            torch._utils.set_tensor_metadata(made, bits)  # type: ignore[no-untyped-call]
    return torch.nn.Parameter(made, requires_grad=False) if kind == "parameter" else made


def tensor_state(made: Any, state: dict[str, Any]) -> None:
    """Complete a tensor: set its autograd state and its attributes."""
    made.requires_grad_(state["requires_grad"])
    if state.get("grad") is not None:
        made.grad = state["grad"]
    if state.get("hooks"):
        made._backward_hooks = state["hooks"]
    if state.get("accumulated_hooks"):
        made._post_accumulate_grad_hooks = state["accumulated_hooks"]
    vars(made).update(state.get("attributes", {}))


def generator(device: str, state: list[int] | bytes) -> Any:
    """Return a random number generator in its saved state."""
    import torch

    made = torch.Generator(device)
    made.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return made


def default_generator(device: str, index: int) -> Any:
    """Return the generator that operators use by default."""
    import torch

    if device == "cpu":
        return torch.default_generator
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return torch.cuda.default_generators[index]


def _device() -> DevicePart:
    device = _now().device
    if device is None:
        raise RuntimeError("this kernel has no device session")
    return device


def same(first: Any) -> Any:
    """Return the same object: two Python objects of one storage become one."""
    return first
