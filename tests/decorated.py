"""Names of decorated functions in programs, found by parsing.

Programs are not imported: that would import torch into the tests' own process, without a proxy.
"""

from __future__ import annotations

import ast
from pathlib import Path


def decorated(path: Path, decorator: str) -> list[str]:
    """Return the names of a module's functions that have a decorator, plain or called.

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
