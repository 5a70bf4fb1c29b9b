"""Detects whether all ``.npy`` files of a field hold arrays of one type and shape, while they are hashed.

They do if all begin with the same header and have the length that it implies. Then the manifest records dtype and
shape, and a batch is one tensor; otherwise the field is bytes, as for any other file. A header is parsed as numpy does,
as a Python literal of bounded length, but its dtype is looked up in a list and never constructed: nothing is unpickled.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from quiver.manifest import Field
from quiver.manifest.schema import ARRAY_DTYPES, is_shape
from quiver.prepared import prepare

SUFFIX: Final = ".npy"
HEADER_BYTES_MAX: Final = 4096  # numpy pads to 128; a shape of 32 dimensions needs some hundred
_MAGIC: Final = b"\x93NUMPY"
_SIZE_BYTES: Final = {b"\x01\x00": 2, b"\x02\x00": 4, b"\x03\x00": 4}  # version -> bytes of the header's length
_LITERAL = re.compile(rb"[ A-Za-z0-9_{}():,'\"<>|=]*\n?")


class Array(msgspec.Struct, frozen=True):
    """The header of a .npy file; ``skip`` is its length in bytes."""

    dtype: str
    shape: tuple[int, ...]
    skip: int


def named_npy(name: str) -> bool:
    """Whether a path, or the extension of a tar member, names a .npy file."""
    return f".{name}".lower().endswith(SUFFIX)


def parse(start: bytes | memoryview, size: int) -> Array | None:
    """Return the header of a file of ``size`` bytes that begins with ``start``; None if it is no supported array."""
    head = bytes(start[:HEADER_BYTES_MAX])
    size_bytes = _SIZE_BYTES.get(head[6:8], 0)
    if head[:6] != _MAGIC or not size_bytes:
        return None
    skip = 8 + size_bytes + int.from_bytes(head[8 : 8 + size_bytes], "little")
    text = head[8 + size_bytes : skip]
    if skip > len(head) or not _LITERAL.fullmatch(text):
        return None
    try:
        said: Any = ast.literal_eval(text.decode())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    if not isinstance(said, dict) or said.keys() != {"descr", "fortran_order", "shape"}:
        return None
    dtype, shape = said["descr"], said["shape"]
    if said["fortran_order"] is not False or not isinstance(dtype, str) or dtype not in ARRAY_DTYPES:
        return None
    item_bytes = int(dtype[2:])
    if not isinstance(shape, tuple) or any(type(side) is not int for side in shape) or not is_shape(shape, item_bytes):
        return None
    return Array(dtype, shape, skip) if size == skip + math.prod(shape) * item_bytes else None


class NpyField:
    """What the .npy files of one field seen so far have in common."""

    def __init__(self, *, possible: bool = True) -> None:
        self._possible = possible
        self._size = 0
        self._header = b""
        self._array: Array | None = None

    def see(self, start: bytes | memoryview, size: int) -> None:
        """Add a sample of ``size`` bytes that begins with ``start``."""
        if not self._possible:
            return
        if self._array is None:
            self._array = parse(start, size)
            self._possible = self._array is not None
            self._size = size
            self._header = bytes(start[: self._array.skip]) if self._array else b""
        elif size != self._size or bytes(start[: len(self._header)]) != self._header:
            self._possible = False

    def watch(self, pieces: Iterable[memoryview], size: int) -> Iterator[memoryview]:
        """Pass on the pieces of a sample, and add it by its first."""
        seen = False
        for piece in pieces:
            if not seen:
                self.see(piece, size)
                seen = True
            yield piece
        if not seen:
            self.see(b"", size)

    def merge(self, other: NpyField) -> None:
        """Merge what another instance saw."""
        if self._array is None:
            self._array, self._size, self._header = other._array, other._size, other._header
        agrees = other._array is None or (other._size, other._header) == (self._size, self._header)
        self._possible = self._possible and other._possible and agrees

    def described(self, field: Field) -> Field:
        """Return the field, as an array if it is one."""
        found = self._array
        if found is None or not self._possible:
            return field
        return msgspec.structs.replace(field, dtype=found.dtype, shape=found.shape, skip=found.skip)


prepare(Array)
