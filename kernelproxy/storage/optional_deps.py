"""The two packages that storing needs and running does not: looked for when something is stored.

So the daemon also works in an environment that has torch and none of our dependencies, such as a
machine with a GPU that nobody can install anything on; only what goes to disk is refused there.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from kernelproxy.common.errors import StoreError


def hash_of(content: bytes | memoryview) -> str:
    """Hash bytes with BLAKE3; in hexadecimal.

    Raises
    ------
    StoreError
        ``unavailable``: the package is not installed.
    """
    made: str = _blake3()(content).hexdigest()
    return made


def zstandard() -> Any:
    """Find the module of that name; raises as `hash_of`."""
    return _found("zstandard")


def _blake3() -> Callable[..., Any]:
    function: Callable[..., Any] = _found("blake3").blake3
    return function


def _found(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        text = f"Nothing can be stored without the package {name}: pip install {name}."
        raise StoreError(text, "unavailable") from error
