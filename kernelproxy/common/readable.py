"""User-facing names and times in place of ids and timestamps (standard library only). Pure.

The daemon's sentences use these names of devices. They contain timestamps in UTC, which `clock`
converts to the reader's local time.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime

from kernelproxy.common.units import duration_text, percent_text

_DEVICE = re.compile(r"\b(cpu|cuda):(\d+)\b")
_MOMENT = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\dZ")
#: Control characters, line ends, characters that change the order of text, and lone surrogates.
#: Characters that join or space others, as in emoji and names of many languages, are not included.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_KINDS = {"cpu": "Simulated GPU", "cuda": "GPU"}


def has_control(text: str) -> bool:
    """True if a text has characters that are not allowed in a name: see `escaped`."""
    return _CONTROL.search(text) is not None


def escaped(text: str, but: str = "") -> str:
    """Escape control characters as Python does, except those in `but`."""
    return _CONTROL.sub(lambda found: found[0] if found[0] in but else ascii(found[0])[1:-1], text)


def quoted(text: str) -> str:
    """Quote a name for a sentence, with control characters escaped."""
    return f"'{escaped(text)}'"


def width(text: str) -> int:
    """Number of terminal columns of a text: wide (East Asian) characters take two."""
    found = 0
    for each in text:
        if unicodedata.category(each) not in {"Mn", "Me", "Cf"}:  # these take no column
            found += 2 if unicodedata.east_asian_width(each) in {"W", "F"} else 1
    return found


def device_name(device: str | None) -> str:
    """Return the user-facing name of a device: ``GPU 1``, ``Simulated GPU 0``."""
    return "no GPU" if not device else devices_named(device)


def devices_named(text: str) -> str:
    """Replace the device ids in a sentence by user-facing names."""
    return _DEVICE.sub(lambda found: f"{_KINDS[found[1]]} {found[2]}", text)


def device_label(device: str | None) -> str:
    """Return a device's name and the id that commands take: ``Simulated GPU 0 (cpu:0)``."""
    return f"{device_name(device)} ({device})" if device else ""


def moment(at: float) -> str:
    """Format a time (seconds since the epoch) in UTC, to the minute, for use with `clock`."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%MZ")


def clock(sentence: str, now: datetime | None = None) -> str:
    """Convert the timestamps of a sentence to local time: ``09:12``; other days get a date."""
    today = (now or datetime.now()).astimezone().date()

    def local(found: re.Match[str]) -> str:
        try:
            at = datetime.fromisoformat(found[0]).astimezone()
        except (OverflowError, ValueError):  # it only looks like a timestamp
            return found[0]
        return at.strftime("%H:%M" if at.date() == today else "%Y-%m-%d %H:%M")

    return _MOMENT.sub(local, sentence)


def turn(position: int, seconds: float | None) -> str:
    """Describe a waiter's place in the queue: ``You are next, about 3 s.``"""
    place = "You are next" if position == 1 else f"Place {position} in the queue"
    return f"{place}." if seconds is None else f"{place}, {soon(seconds)}."


def sharing(devices: Sequence[str], others: Sequence[str], share: float) -> str:
    """Describe how devices are shared: ``Sharing GPU 1 with bob and 1 more · my share 50 %``."""
    where = device_name(devices[0]) if len(devices) == 1 else f"{len(devices)} GPUs"
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return f"Sharing {where} with {others[0]}{more} · my share {percent_text(share)}"


_TURN = re.compile(r" (?:You are next|Place \d+ in the queue)[^.]*\.")


def without_turn(sentence: str) -> str:
    """Remove the text of `turn` from a sentence, as it changes all the time."""
    return _TURN.sub("", sentence)


def soon(seconds: float) -> str:
    """Format an expected wait, no more precisely than an estimate allows."""
    if seconds < 0.5:
        return "any moment now"
    return f"about {duration_text(max(1.0, seconds))}"
