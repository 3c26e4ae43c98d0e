"""Settings from environment variables, as defaults of traits with the same meaning."""

from __future__ import annotations

import logging
import math
import os
from contextlib import suppress


def number(name: str, usual: float, log: logging.Logger) -> float:
    """Return the value of ``JUPYTER_SING_<name>``; `usual` if unset.

    If it is not a number, log a warning and return `usual`.
    """
    variable = f"JUPYTER_SING_{name}"
    text = os.environ.get(variable) or f"{usual:g}"
    with suppress(ValueError):
        if math.isfinite(found := float(text)):
            return found
    log.warning("%s is not a number: %r; using %g.", variable, text, usual)
    return usual


def asked_number(name: str, log: logging.Logger) -> float | None:
    """Return the value of ``JUPYTER_SING_<name>``; None if unset.

    If it is not a number, log a warning and return None.
    """
    if not os.environ.get(f"JUPYTER_SING_{name}"):
        return None
    found = number(name, math.inf, log)
    return None if found == math.inf else found


def user() -> str:
    """Return the user of this process: ``JUPYTER_SING_USER``, ``JUPYTERHUB_USER``, else ""."""
    return os.environ.get("JUPYTER_SING_USER") or os.environ.get("JUPYTERHUB_USER") or ""


def switched_on(name: str) -> bool:
    """True unless ``JUPYTER_SING_<name>`` is ``0``, ``false``, ``no`` or ``off``."""
    text = os.environ.get(f"JUPYTER_SING_{name}", "1")
    return text.strip().lower() not in ("0", "false", "no", "off")
