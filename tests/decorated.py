"""Names of functions in programs, read from their text: to import one would import torch, which in
the tests' own process would be another torch, without a proxy.
"""

from __future__ import annotations

import ast
from pathlib import Path


def decorated(path: Path, decorator: str) -> list[str]:
    """Name the functions of a module that have a decorator, plain or called.

    Parameters
    ----------
    path : Path
        Of the module.
    decorator : str
        Its name there.
    """

    def has_it(node: ast.FunctionDef) -> bool:
        names = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
        return any(isinstance(name, ast.Name) and name.id == decorator for name in names)

    body = ast.parse(path.read_text("utf-8")).body
    return [node.name for node in body if isinstance(node, ast.FunctionDef) and has_it(node)]
