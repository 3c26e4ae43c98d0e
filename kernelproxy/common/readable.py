"""What people read where programs read ids and moments (standard library only). Pure.

The daemon's sentences call devices by these names, and hold moments as they are in every zone:
`clock` puts them on the clock of whoever reads.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime

_DEVICE = re.compile(r"\b(cpu|cuda):(\d+)\b")
_MOMENT = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\dZ")
#: Control characters, ends of lines, what changes the order of text, and halves of characters.
#: What joins or spaces characters, as in emoji and in names of many languages, is none of these.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_KINDS = {"cpu": "Simulated GPU", "cuda": "GPU"}


def has_control(text: str) -> bool:
    """Whether a text has characters that are no part of a name: see `escaped`."""
    return _CONTROL.search(text) is not None


def escaped(text: str, but: str = "") -> str:
    """Write what would control a terminal as Python writes it, but not some of it."""
    return _CONTROL.sub(lambda found: found[0] if found[0] in but else ascii(found[0])[1:-1], text)


def quoted(text: str) -> str:
    """Write a name in a sentence, as it is but for what would control a terminal."""
    return f"'{escaped(text)}'"


def width(text: str) -> int:
    """Columns that a text takes in a terminal: two for each wide character, as of East Asia."""
    found = 0
    for each in text:
        if unicodedata.category(each) not in {"Mn", "Me", "Cf"}:  # which have no place of their own
            found += 2 if unicodedata.east_asian_width(each) in {"W", "F"} else 1
    return found


def bytes_text(count: float) -> str:
    """Write a number of bytes: ``1.5 GiB``; as `bytesText` of the panels does."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def device_name(device: str | None) -> str:
    """Say what people call a device: ``GPU 1``, ``Simulated GPU 0``."""
    return "no GPU" if not device else devices_named(device)


def devices_named(text: str) -> str:
    """Put names for the ids of devices in a sentence."""
    return _DEVICE.sub(lambda found: f"{_KINDS[found[1]]} {found[2]}", text)


def device_label(device: str | None) -> str:
    """Name a device, with the id that commands take: ``Simulated GPU 0 (cpu:0)``."""
    return f"{device_name(device)} ({device})" if device else ""


def moment(at: float) -> str:
    """Write a moment, in seconds of the epoch, to the minute, for a sentence that `clock` reads."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%MZ")


def clock(sentence: str, now: datetime | None = None) -> str:
    """Put the moments of a sentence in local time: ``09:12``, of other days with the date."""
    today = (now or datetime.now()).astimezone().date()

    def local(found: re.Match[str]) -> str:
        try:
            at = datetime.fromisoformat(found[0]).astimezone()
        except (OverflowError, ValueError):  # it only looks like one
            return found[0]
        return at.strftime("%H:%M" if at.date() == today else "%Y-%m-%d %H:%M")

    return _MOMENT.sub(local, sentence)


def turn(position: int, seconds: float | None) -> str:
    """Say when it is the turn of who waits: ``You are next, about 3 s.``"""
    place = "You are next" if position == 1 else f"Place {position} in the queue"
    return f"{place}." if seconds is None else f"{place}, {soon(seconds)}."


def sharing(devices: Sequence[str], others: Sequence[str], share: float) -> str:
    """Say with whom somebody takes turns: ``Sharing GPU 1 with bob and 1 more · my share 50 %``."""
    where = device_name(devices[0]) if len(devices) == 1 else f"{len(devices)} GPUs"
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return f"Sharing {where} with {others[0]}{more} · my share {100 * share:.0f} %"


_TURN = re.compile(r" (?:You are next|Place \d+ in the queue)[^.]*\.")


def without_turn(sentence: str) -> str:
    """Leave out of a sentence what `turn` says, which changes all the time."""
    return _TURN.sub("", sentence)


def soon(seconds: float) -> str:
    """Say after which time something is expected, as precisely as anybody can know it."""
    if seconds < 0.5:
        return "any moment now"
    for unit, length, least in (("h", 3600.0, 5400.0), ("min", 60.0, 90.0)):
        if seconds >= least:
            return f"about {seconds / length:.0f} {unit}"
    return f"about {max(1.0, seconds):.0f} s"
