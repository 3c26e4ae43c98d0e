"""Text that somebody else may have written. Standard library only: every process reads some."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises
    ------
    ValueError
        If it is none, or is nested more deeply than Python's parser goes, which by itself raises
        RecursionError then: no exception that anybody expects of a damaged file.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
