"""Parsing of untrusted text. Standard library only, because every process needs it."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises
    ------
    ValueError
        If it is not JSON, or is nested more deeply than Python's parser supports. For the latter
        the parser itself raises RecursionError, which callers do not expect for a damaged file.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
