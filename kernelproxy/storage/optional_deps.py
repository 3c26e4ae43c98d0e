"""The two optional packages, which only the chunk store needs; imported at first use.

So the daemon also works in an environment that has torch but none of our dependencies, such as a
GPU machine where packages cannot be installed. Only storing on disk is refused there.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from kernelproxy.common.errors import StoreError


def hash_of(content: bytes | memoryview) -> str:
    """Return the BLAKE3 hash of bytes, in hexadecimal.

    Raises
    ------
    StoreError
        ``unavailable``: the package is not installed.
    """
    made: str = _blake3()(content).hexdigest()
    return made


def zstandard() -> Any:
    """Return the module ``zstandard``; raises as `hash_of`."""
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
