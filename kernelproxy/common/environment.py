"""Settings from the environment, for whoever has a trait of the same meaning."""

from __future__ import annotations

import logging
import math
import os
from contextlib import suppress


def number(name: str, usual: float, log: logging.Logger) -> float:
    """Value of ``JUPYTER_SING_<name>``; the usual one, with a warning, if it is no number."""
    variable = f"JUPYTER_SING_{name}"
    text = os.environ.get(variable) or f"{usual:g}"
    with suppress(ValueError):
        if math.isfinite(found := float(text)):
            return found
    log.warning("%s is not a number: %r; using %g.", variable, text, usual)
    return usual


def asked_number(name: str, log: logging.Logger) -> float | None:
    """Value of ``JUPYTER_SING_<name>``; None if it is not there, or, with a warning, no number."""
    if not os.environ.get(f"JUPYTER_SING_{name}"):
        return None
    found = number(name, math.inf, log)
    return None if found == math.inf else found


def user() -> str:
    """Who this process works for: ``JUPYTER_SING_USER``, ``JUPYTERHUB_USER``, or nobody named."""
    return os.environ.get("JUPYTER_SING_USER") or os.environ.get("JUPYTERHUB_USER") or ""


def switched_on(name: str) -> bool:
    """Whether ``JUPYTER_SING_<name>`` is anything but ``0``, ``false``, ``no`` or ``off``."""
    text = os.environ.get(f"JUPYTER_SING_{name}", "1")
    return text.strip().lower() not in ("0", "false", "no", "off")
