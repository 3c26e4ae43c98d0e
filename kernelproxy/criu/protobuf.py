"""Protocol buffers without a schema: just enough to read and change CRIU's images.

A message is a list of fields, in order and complete, including unknown fields: what is not changed
is written as it was read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from kernelproxy.common.errors import ProcessError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
VARINT_BYTES_MAX = 10
ENTRY_BYTES_MAX = 1 << 28
_SIZES = {FIXED64: 8, FIXED32: 4}


@dataclass(frozen=True)
class ProtobufField:
    """Field of a message.

    Parameters
    ----------
    number : int
    kind : int
        ``VARINT``, ``FIXED64``, ``BYTES`` or ``FIXED32``.
    value : int or bytes
        Number of a ``VARINT``; bytes of all other kinds.
    """

    number: int
    kind: int
    value: int | bytes


class Fields(list[ProtobufField]):
    """Fields of one message."""

    @classmethod
    def parse(cls, data: bytes) -> Fields:
        """Parse a message.

        Raises
        ------
        ProcessError
            If it is not valid.
        """
        fields, at = cls(), 0
        while at < len(data):
            key, at = _varint(data, at)
            number, kind = key >> 3, key & 7
            if not number:
                raise damaged("a field has no number")
            if kind == VARINT:
                value, at = _varint(data, at)
                fields.append(ProtobufField(number, kind, value))
                continue
            if kind == BYTES:
                count, at = _varint(data, at)
            elif kind in _SIZES:
                count = _SIZES[kind]
            else:
                raise damaged(f"a field is of the unknown kind {kind}")
            if count > len(data) - at:
                raise damaged("a field is longer than its message")
            fields.append(ProtobufField(number, kind, data[at : at + count]))
            at += count
        return fields

    def encode(self) -> bytes:
        """Encode the message."""
        parts = []
        for each in self:
            parts.append(_encode_varint(each.number << 3 | each.kind))
            if isinstance(each.value, int):
                parts.append(_encode_varint(each.value))
                continue
            if each.kind == BYTES:
                parts.append(_encode_varint(len(each.value)))
            parts.append(each.value)
        return b"".join(parts)

    def number(self, number: int) -> int:
        """Return the value of a numeric field; 0 if there is none."""
        found = self.numbers(number)
        return found[-1] if found else 0

    def numbers(self, number: int) -> list[int]:
        """Return all values of a repeated numeric field, packed or not."""
        values: list[int] = []
        for each in self:
            if each.number != number:
                continue
            if isinstance(each.value, int):
                values.append(each.value)
            elif each.kind == BYTES:
                at = 0
                while at < len(each.value):
                    value, at = _varint(each.value, at)
                    values.append(value)
            else:
                raise damaged(f"field {number} is no number")
        return values

    def data(self, number: int) -> bytes:
        """Return the value of a field of bytes; empty if there is none."""
        found = self.all_data(number)
        return found[-1] if found else b""

    def all_data(self, number: int) -> list[bytes]:
        """Return all values of a repeated field of bytes, such as messages."""
        values = [each.value for each in self if each.number == number]
        if not all(isinstance(each, bytes) for each in values):
            raise damaged(f"field {number} holds no bytes")
        return [each for each in values if isinstance(each, bytes)]

    def message(self, number: int) -> Fields | None:
        """Return the message in a field, or None."""
        found = self.all_data(number)
        return Fields.parse(found[-1]) if found else None

    def put(self, number: int, value: int | bytes) -> None:
        """Replace the value of a field, or add the field."""
        field = ProtobufField(number, VARINT if isinstance(value, int) else BYTES, value)
        for at, each in enumerate(self):
            if each.number == number:
                self[at] = field
                return
        self.append(field)

    def drop(self, *numbers: int) -> None:
        """Remove fields."""
        self[:] = [each for each in self if each.number not in numbers]


def entries(data: bytes, magic: tuple[int, int]) -> Iterator[Fields]:
    """Parse the entries of an image file.

    Parameters
    ----------
    data : bytes
        The whole file.
    magic : (int, int)
        Its first bytes.

    Raises
    ------
    ProcessError
        If it is not such a file, or damaged.
    """
    head = struct.pack("<II", *magic)
    if data[: len(head)] != head:
        raise damaged("a file is not of the kind that its name says")
    at = len(head)
    while at < len(data):
        if len(data) - at < 4:
            raise damaged("a file ends within an entry")
        (count,) = struct.unpack_from("<I", data, at)
        at += 4
        if count > ENTRY_BYTES_MAX or count > len(data) - at:
            raise damaged("an entry is longer than its file")
        yield Fields.parse(data[at : at + count])
        at += count


def encode_entries(found: list[Fields], magic: tuple[int, int]) -> bytes:
    """Encode an image file."""
    parts = [struct.pack("<II", *magic)]
    for each in found:
        data = each.encode()
        parts += [struct.pack("<I", len(data)), data]
    return b"".join(parts)


def damaged(what: str) -> ProcessError:
    """Return the error for damaged images."""
    return ProcessError(f"the images of the process are damaged: {what}", "restore")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift, byte in enumerate(data[at : at + VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            if value >= 1 << 64:
                raise damaged("a number is too large")
            return value, at + shift + 1
    raise damaged("a number does not end")


def _encode_varint(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
