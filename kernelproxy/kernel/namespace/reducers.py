"""Reducers for other objects: those that pickle would save wrongly, and those it must not save.

Some objects pickle without an error and do not work afterwards: a process, a progress bar, a
widget. They are refused here, so that they are reported instead.
"""

from __future__ import annotations

import _thread
import copyreg
import functools
import gc
import logging
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from kernelproxy.kernel.files import open_files
from kernelproxy.kernel.namespace import class_instances, rebuild
from kernelproxy.kernel.namespace.types import Reduced, Unsaveable

Rule = Callable[[Any], Any]

STREAMS = ("stdin", "stdout", "stderr")

#: Types, including subclasses, whose objects are not saved: by name, with a description.
REFUSED = {
    "IPython.core.displayhook.DisplayHook": "a part of IPython",
    "_asyncio.Future": "a future of asyncio",
    "_asyncio.Task": "a task of asyncio",
    "_frozen_importlib_external.SourceFileLoader": "an import loader",
    "_thread._local": "a thread's local data",
    "_thread._localdummy": "a thread's local data",
    "asyncio.events.AbstractEventLoop": "an event loop",
    "builtins.frame": "a frame of running code",
    "builtins.memoryview": "a memoryview",
    "builtins.traceback": "a traceback",
    "comm.base_comm.BaseComm": "a connection to the browser",
    "concurrent.futures._base.Executor": "a pool of workers",
    "ctypes.CDLL": "a loaded library",
    "dbm.dumb._Database": "an open database",
    "h5py._hl.base.HLObject": "an open HDF5 file",
    "ipywidgets.widgets.widget.Widget": "a widget",
    "ipywidgets.widgets.widget_output.Output": "a widget",
    "matplotlib.animation.Animation": "an animation",
    "mmap.mmap": "a memory map",
    "multiprocessing.connection._ConnectionBase": "a connection to another process",
    "multiprocessing.connection.Listener": "a listener for other processes",
    "multiprocessing.managers.BaseManager": "a manager process",
    "multiprocessing.managers.BaseProxy": "an object in another process",
    "multiprocessing.pool.Pool": "a pool of processes",
    "multiprocessing.process.BaseProcess": "a process",
    "multiprocessing.queues.Queue": "a queue between processes",
    "multiprocessing.shared_memory.SharedMemory": "memory shared with other processes",
    "pexpect.spawnbase.SpawnBase": "a process",
    "psutil.Process": "a process",
    "selectors.BaseSelector": "a selector of open files",
    "shelve.Shelf": "an open database",
    "socket.socket": "a socket",
    "socketserver.BaseServer": "a server",
    "sqlalchemy.engine.base.Connection": "a database connection",
    "sqlalchemy.engine.base.Engine": "a database connection",
    "sqlalchemy.orm.session.Session": "a database session",
    "ssl.SSLContext": "a TLS context",
    "subprocess.Popen": "a process",
    "tarfile.TarFile": "an open archive",
    "tempfile.SpooledTemporaryFile": "a temporary file",
    "tempfile.TemporaryDirectory": "a temporary directory",
    "tempfile._TemporaryFileWrapper": "a temporary file",
    "threading.Thread": "a thread",
    "torch.Event": "an event of a device",
    "torch.Stream": "a stream of a device",
    "torch._C.Event": "an event of a device",
    "torch._C.Stream": "a stream of a device",
    "torch.cuda.graphs.CUDAGraph": "a CUDA graph",
    "torch.cuda.streams.Event": "an event of a device",
    "torch.cuda.streams.Stream": "a stream of a device",
    "torch.utils.data.dataloader._BaseDataLoaderIter": "an iterator of a DataLoader",
    "torch.utils.tensorboard.writer.SummaryWriter": "a writer with a thread",
    "tqdm.std.tqdm": "a progress bar",
    "weakref.ReferenceType": "a weak reference",
    "weakref.finalize": "a finalizer",
    "zipfile.ZipFile": "an open archive",
    "zmq.sugar.context.Context": "a context of ZeroMQ",
    "zmq.sugar.socket.Socket": "a socket",
}

#: Descriptions of objects whose own types refuse to be pickled.
NAMES = {
    "_contextvars.Context": "a context",
    "_contextvars.ContextVar": "a context variable",
    "_csv.reader": "a CSV reader",
    "_csv.writer": "a CSV writer",
    "_queue.SimpleQueue": "a queue between threads",
    "builtins.Context": "a context",
    "builtins.ContextVar": "a context variable",
    "builtins.async_generator": "an asynchronous generator",
    "builtins.coroutine": "a coroutine",
    "builtins.generator": "a generator",
    "sqlite3.Connection": "a database connection",
    "sqlite3.Cursor": "a database cursor",
    "torch.jit.ScriptModule": "a TorchScript module",
}


def rule(kind: type, note: Callable[[Any, str], None]) -> Rule | None:
    """Return the reducer for objects of a type, or None if cloudpickle's default is right.

    `note` is called with an object and a line about a part of it that is not saved.
    """
    for base in kind.__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        if (phrase := REFUSED.get(name)) is not None:
            return _refuse(phrase)
        if (found := _RULES_BY_NAME.get(name)) is not None:
            return found
    if (found := _RULES.get(kind)) is not None:
        return found
    if (opened := open_files.rule(kind)) is not None:
        return opened
    if issubclass(kind, logging.Logger):
        return _logger
    if issubclass(kind, logging.Handler):
        return _handler
    if issubclass(kind, BaseException):
        return functools.partial(_exception, note)
    if kind.__module__ == "sys" and issubclass(kind, tuple):
        return _of_process
    if kind.__module__ == "__main__":
        return class_instances.rule(kind)
    plain = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    if plain and kind.__module__ in sys.modules:
        return _Sentinels(kind).reduce
    return None


def describe(offender: Any, error: BaseException) -> str:
    """Return a short description of what could not be saved."""
    if isinstance(error, Unsaveable):
        return str(error)
    kind = type(offender)
    for base in kind.__mro__:
        if (phrase := NAMES.get(f"{base.__module__}.{base.__qualname__}")) is not None:
            return phrase
    if isinstance(error, RecursionError) or "recursion" in str(error):
        return "nested too deeply"
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    text = " ".join(str(error).split())[:200]
    if not text or text.startswith(("cannot pickle", "can't pickle")):
        return f"{_article(name)} {name}"
    return f"{_article(name)} {name}, which says: {text}"


def known_objects() -> Iterator[tuple[Any, str, str]]:
    """Yield objects of which every process has its own, each with its module and its path there.

    Code that refers to one of these, often implicitly, means the object of the current process:
    the functions of the module `random`, for example, are methods of such an object.
    """
    places = [("os", "environ"), ("random", "_inst"), ("numpy.random.mtrand", "_rand")]
    places += [("dataclasses", "MISSING"), ("dataclasses", "KW_ONLY"), ("matplotlib", "rcParams")]
    places += [("sys", f"{under}{name}{under}") for name in STREAMS for under in ("", "__")]
    for module, name in places:
        obj = getattr(sys.modules.get(module), name, None)
        if obj is not None:
            yield obj, module, name


def _refuse(phrase: str) -> Rule:
    def refuse(obj: Any) -> Any:
        raise Unsaveable(phrase)

    return refuse


def _article(name: str) -> str:
    return "an" if name[:1].lower() in "aeiou" else "a"


# ---------------------------------------------------------------- rules


def _lock(lock: Any) -> Reduced:
    if lock.locked():
        raise Unsaveable("a lock that is held")
    return rebuild.lock, ()


def _rlock(lock: Any) -> Reduced:
    if lock._is_owned() or not lock.acquire(blocking=False):
        raise Unsaveable("a lock that is held")
    lock.release()
    return rebuild.rlock, ()


def _dict_view(found: Any) -> Reduced | Any:
    return rebuild.dict_view, (_referent(found, dict), type(found).__name__.rpartition("_")[2])


def _mapping_proxy(proxy: Any) -> Reduced:
    (of,) = gc.get_referents(proxy)
    if {"__module__", "__dict__"} <= of.keys():
        raise Unsaveable("the attributes of a class")
    return types.MappingProxyType, (of,)


def _referent(found: Any, kind: type) -> Any:
    """Return the dictionary behind a view of it."""
    return next(of for of in gc.get_referents(found) if isinstance(of, kind))


def _weak_dict(found: Any) -> Reduced:
    return rebuild.weak_dict, (type(found), list(found.items()))


def _weak_set(found: Any) -> Reduced:
    return rebuild.weak_set, (list(found),)


def _logger(logger: logging.Logger) -> Reduced:
    state = {
        name: getattr(logger, name)
        for name in ("level", "propagate", "disabled", "filters", "handlers")
    }
    name = None if logger is logging.root else logger.name
    return rebuild.logger, (name,), state, None, None, rebuild.logger_state


def _handler(handler: logging.Handler) -> Reduced:
    state = {name: value for name, value in vars(handler).items() if name != "lock"}
    return rebuild.bare, (type(handler),), state, None, None, rebuild.handler_state


def _exception(note: Callable[[Any, str], None], error: BaseException) -> Reduced | Any:
    kind = type(error)
    if error.__traceback__ is not None:
        note(error, "it is saved, its traceback is not")
    if (
        kind.__reduce__ is not BaseException.__reduce__
        and kind.__reduce__ is not OSError.__reduce__
    ):
        return NotImplemented
    state = {
        "cause": error.__cause__,
        "context": error.__context__,
        "suppress": error.__suppress_context__,
        "attributes": dict(vars(error)),
    }
    made: Any = (rebuild.exception, (kind, error.args))
    if not isinstance(kind.__init__, types.FunctionType):
        made = error.__reduce__()[:2]  # constructors in C keep more than the arguments
    return *made, state, None, None, rebuild.exception_state


def _pandas_block(block: Any) -> Any:
    """Copy a block that shares memory with others until one of them is written to.

    pandas keeps references between such blocks, and pickling loses them: afterwards, writing to one
    would change the other. So a block that shares memory has its own copy in the stream.
    """
    copies_on_write = int(sys.modules["pandas"].__version__.split(".")[0]) >= 3
    if not copies_on_write or not block.refs.has_reference():
        return NotImplemented
    make, (_, *rest) = block.__reduce__()
    return make, (block.values.copy(), *rest)


def _future(future: Any) -> Any:
    if not future.done():
        raise Unsaveable("a future without a result")
    return NotImplemented


def _of_process(facts: Any) -> Reduced:
    """Reduce facts of the process, such as ``sys.version_info``, whose types cannot be imported."""
    for name, value in vars(sys).items():
        if value is facts:
            return rebuild.known, ("sys", name)
    raise Unsaveable(f"{type(facts).__name__} of this process")


def _plotly_figure(figure: Any) -> Reduced:
    """Reduce a figure with its arrays; plotly's own reduction would convert them to text."""
    frames = [frame._props for frame in figure._frame_objs]
    props = {"data": figure._data, "layout": figure._layout, "_grid_str": figure._grid_str}
    return type(figure), ({**props, "frames": frames} if frames else props,)


def _shell(shell: Any) -> Reduced:
    return rebuild.shell, ()


class _Sentinels:
    """Reducer of stateless objects that are known by name in the module of their class."""

    def __init__(self, kind: type) -> None:
        module = kind.__module__
        names = vars(sys.modules[module]).items()
        self._module = module
        self._names = {id(value): name for name, value in names if type(value) is kind}

    def reduce(self, obj: Any) -> Reduced | Any:
        name = self._names.get(id(obj))
        if name is None or getattr(obj, "__dict__", None) or copyreg._slotnames(type(obj)):  # type: ignore[attr-defined]
            return NotImplemented
        return rebuild.known, (self._module, name)


_RULES: dict[type, Rule] = {
    _thread.LockType: _lock,
    _thread.RLock: _rlock,
    type({}.keys()): _dict_view,
    type({}.values()): _dict_view,
    type({}.items()): _dict_view,
    type(OrderedDict().keys()): _dict_view,
    type(OrderedDict().values()): _dict_view,
    type(OrderedDict().items()): _dict_view,
    types.MappingProxyType: _mapping_proxy,
    weakref.WeakKeyDictionary: _weak_dict,
    weakref.WeakValueDictionary: _weak_dict,
    weakref.WeakSet: _weak_set,
}

#: For types of libraries and their subclasses, by name, so that none is imported.
_RULES_BY_NAME: dict[str, Rule] = {
    "IPython.core.interactiveshell.InteractiveShell": _shell,
    "concurrent.futures._base.Future": _future,
    "pandas.core.internals.blocks.Block": _pandas_block,
    "plotly.basedatatypes.BaseFigure": _plotly_figure,
}
