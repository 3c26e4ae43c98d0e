"""Errors in a policy: what is wrong, in one line, and where."""

from __future__ import annotations

SHOWN_MAX = 60


class PolicyError(ValueError):
    """A policy cannot be used.

    Its text is one line: where in the document, what is wrong, what is allowed.

    Parameters
    ----------
    path : str
        Where in the document, such as ``virtual_clusters.vision.users[2].weight``; empty for the
        document itself.
    problem : str
        What is wrong, and what is allowed.
    line : int or None
        Line of the text, from 1; None if it is in no line.
    """

    def __init__(self, path: str, problem: str, line: int | None = None) -> None:
        self.path = path
        self.problem = problem
        self.line = line
        where = "" if line is None else f" (line {line})"
        super().__init__(f"{path or 'policy'}: {problem}{where}")


def quoted(text: str) -> str:
    """Quote text of a user: on one line, not too long, and without control characters."""
    shown = text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"
    return repr(shown) if shown.isprintable() else ascii(shown)


def joined(path: str, key: str) -> str:
    """Return the path of a key below a path; a key that is not a plain word is quoted."""
    plain = 0 < len(key) <= SHOWN_MAX and all(c.isalnum() or c in "_-" for c in key)
    word = key if plain else quoted(key)
    return f"{path}.{word}" if path else word
