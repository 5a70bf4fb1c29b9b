"""A reader of flatbuffers that checks every position. Arrow describes its messages in them (``Message.fbs``)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

from quiver.errors import BadRequest

_SLOT_BYTES: Final = 2
_VTABLE_BYTES: Final = 4  # its own size and the table's, which precede the slots
_ITEM_BYTES: Final = 4  # of a vector of tables: the offset of each


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a flatbuffer. A slot is the number of a field in its schema."""

    data: memoryview
    at: int

    @classmethod
    def root(cls, data: memoryview) -> Table:
        return cls(data, _number(data, "<I", 0))

    def number(self, slot: int, kind: str, default: int = 0) -> int:
        """Return a numeric field, unpacked by the ``struct`` format ``kind``; ``default`` if it is absent."""
        at = self._place(slot)
        return _number(self.data, kind, at) if at else default

    def has(self, slot: int) -> bool:
        return self._place(slot) > 0

    def table(self, slot: int) -> Table:
        at = self._place(slot)
        if not at:
            raise BadRequest("a part of its metadata is missing")
        return Table(self.data, at + _number(self.data, "<I", at))

    def tables(self, slot: int, most: int) -> list[Table]:
        """Return a vector of at most so many tables; empty if it is absent."""
        start, count = self._vector(slot, _ITEM_BYTES, most)
        places = range(start, start + count * _ITEM_BYTES, _ITEM_BYTES)
        return [Table(self.data, at + _number(self.data, "<I", at)) for at in places]

    def structs(self, slot: int, kind: str, most: int) -> list[tuple[Any, ...]]:
        """Return a vector of at most so many structs, each as ``kind`` unpacks it; empty if it is absent."""
        size = struct.calcsize(kind)
        start, count = self._vector(slot, size, most)
        return list(struct.iter_unpack(kind, self.data[start : start + count * size]))

    def _vector(self, slot: int, item_bytes: int, most: int) -> tuple[int, int]:
        at = self._place(slot)
        if not at:
            return 0, 0
        at += _number(self.data, "<I", at)
        count = _number(self.data, "<I", at)
        if count > most:
            raise BadRequest(f"its metadata lists {count} things where {most} are allowed")
        start = at + 4
        if start + count * item_bytes > len(self.data):
            raise BadRequest("its metadata is damaged")
        return start, count

    def _place(self, slot: int) -> int:
        """Return the position of a field, 0 if it is absent."""
        vtable = self.at - _number(self.data, "<i", self.at)
        inside = _VTABLE_BYTES + _SLOT_BYTES * slot
        if inside + _SLOT_BYTES > _number(self.data, "<H", vtable):
            return 0
        offset = _number(self.data, "<H", vtable + inside)
        return self.at + offset if offset else 0


def _number(data: memoryview, kind: str, at: int) -> int:
    if not 0 <= at <= len(data) - struct.calcsize(kind):
        raise BadRequest("its metadata is damaged")
    number: int = struct.unpack_from(kind, data, at)[0]
    return number
