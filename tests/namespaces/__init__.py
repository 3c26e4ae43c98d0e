"""Small notebooks with typical namespaces, each with a check of its state.

Each is a source, run in an IPython shell, whose namespace is saved; and a check, run there
afterwards and, after restoring, in a shell of another process: it must print the same.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Notebook:
    """One notebook.

    Parameters
    ----------
    name : str
        What is in it.
    source : str
        Its cells; a line ``# %%`` begins another one.
    check : str
        A cell that prints what must be the same after restoring.
    omitted : tuple of str
        Variables that are not saved.
    partly : tuple of str
        Variables that are saved without something, which is named.
    """

    name: str
    source: str
    check: str
    omitted: tuple[str, ...] = ()
    partly: tuple[str, ...] = ()
