"""Iterates over the members of an uncompressed tar (ustar, GNU and pax headers), with the caller's read function.

The standard library's reader takes garbage in the middle of an archive for its end and keeps an object per member. Here
an unreadable header is an error that names the offset.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from quiver.errors import BadRequest

BLOCK: Final = 512
PADDING_BYTES: Final = 64 << 10
EXTENDED_BYTES_MAX: Final = 1 << 20  # of a long name or a pax header
_PAX, _PAX_GLOBAL, _LONG_NAME, _LONG_LINK, _SPARSE = b"x", b"g", b"L", b"K", b"S"
_WITHOUT_DATA: Final = frozenset(b"123456")  # links, devices, folders, pipes
_LINK_OR_DEVICE: Final = {b"1": "hard link", b"2": "symbolic link", b"3": "device", b"4": "device", b"6": "pipe"}
_OCTAL: Final = re.compile(rb"[0-7]+")
_IS_SPARSE: Final = "GNU.sparse"  # stands for all records of a sparse file but its name: nobody asks for them
_COMPRESSED: Final = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"(\xb5": "zstd", b'\x04"': "lz4"}

ReadAt = Callable[[int, int], memoryview]  # (offset, length) -> exactly that many bytes, valid until the next call


@dataclass(frozen=True, slots=True)
class TarMember:
    """A member; ``odd`` describes it if it is not a regular file."""

    name: str
    start: int  # offset of its first header
    offset: int  # of its bytes
    size: int
    odd: str = ""


def members(
    url: str,
    size: int,
    read: ReadAt,
    no_end: Callable[[], None] = lambda: None,
    more: Callable[[], None] = lambda: None,
) -> Iterator[TarMember]:
    """Yield the members of a tar of ``size`` bytes, except folders.

    ``no_end`` is called if the end mark is missing, ``more`` if something follows it, as in concatenated tars.

    Raises ``BadRequest`` naming ``url`` and the offset at which the tar is damaged or truncated.
    """
    walk = _Walk(url, size, read)
    while (member := walk.next()) is not None:
        if member.odd != "folder":
            yield member
    if not walk.ended:
        no_end()
    elif walk.goes_on():
        more()


class _Walk:
    def __init__(self, url: str, size: int, read: ReadAt) -> None:
        self._url = url
        self._size = size
        self._read = read
        self._at = 0
        self._globals: dict[str, str] = {}
        self.ended = False

    def goes_on(self) -> bool:
        """Whether anything but padding follows the end mark."""
        for at in range(self._at, self._size, PADDING_BYTES):
            if any(self._read(at, min(PADDING_BYTES, self._size - at))):
                return True
        return False

    def next(self) -> TarMember | None:
        """Return the next member, with its extended headers applied."""
        start = self._at
        pax: dict[str, str] = {}
        long_name = ""
        while True:
            if self._at + BLOCK > self._size:
                if self._at < self._size or self._at != start:
                    raise self._broken(self._at, "ends in the middle of a header")
                return None
            header = bytes(self._read(self._at, BLOCK))
            if header[0] == 0 and not any(header):
                if self._at != start:
                    raise self._broken(self._at, "ends between an extended header and its member")
                self.ended = True
                return None
            size = self._checked_size(header)
            kind = header[156:157]
            if kind in (_PAX, _PAX_GLOBAL):
                records = self._pax(self._extended(size))
                pax.update(records) if kind == _PAX else self._globals.update(records)
            elif kind == _LONG_NAME:
                long_name = self._text(self._extended(size).rstrip(b"\0"))
            elif kind == _LONG_LINK:
                self._extended(size)
            else:
                return self._member(start, header, kind, size, long_name, {**self._globals, **pax})

    def _member(
        self, start: int, header: bytes, kind: bytes, size: int, long_name: str, pax: dict[str, str]
    ) -> TarMember:
        data = self._at + BLOCK
        if kind == _SPARSE:
            more = header[482]
            while more:  # the map of a sparse file continues in further blocks
                if data + BLOCK > self._size:
                    raise self._broken(data, "ends in the map of a sparse file")
                more = self._read(data, BLOCK)[504]
                data += BLOCK
        name = pax.get("GNU.sparse.name") or pax.get("path") or long_name or self._text(_name(header))
        if "size" in pax:
            size = self._decimal(pax["size"])
        odd = _LINK_OR_DEVICE.get(kind, "")
        if kind == _SPARSE or _IS_SPARSE in pax or "GNU.sparse.name" in pax:
            odd = "sparse file"
        elif kind == b"5" or (kind in (b"\0", b"0") and name.endswith("/")):
            odd = "folder"
        elif kind not in (b"\0", b"0", b"7") and not odd:
            odd = f"member of type {kind!r}"
        stored = 0 if kind[0] in _WITHOUT_DATA else size
        if data + stored > self._size:
            raise self._broken(start, f"is cut short: member {name!r} needs {stored} bytes from {data}")
        self._at = data + -(-stored // BLOCK) * BLOCK
        self._at = min(self._at, self._size)  # the padding of the last member may be missing
        return TarMember(name, start, data, size, odd)

    def _extended(self, size: int) -> bytes:
        """Return the content of the extended header at the current offset, and advance past it."""
        data = self._at + BLOCK
        if size > EXTENDED_BYTES_MAX or data + size > self._size:
            raise self._broken(self._at, f"has an extended header of {size} bytes, which is truncated or too large")
        content = bytes(self._read(data, size))
        self._at = data + -(-size // BLOCK) * BLOCK
        return content

    def _checked_size(self, header: bytes) -> int:
        try:
            expected = int(header[148:156].strip(b" \0"), 8)
        except ValueError:
            expected = -1
        if sum(header) - sum(header[148:156]) + 8 * 32 != expected:
            for magic, name in _COMPRESSED.items():
                if self._at == 0 and header.startswith(magic):
                    raise BadRequest(
                        f"{self._url} is compressed ({name}), and samples inside it cannot be read by byte ranges;"
                        " decompress it and index again"
                    )
            raise self._broken(self._at, "has no valid header there (wrong checksum)")
        field = header[124:136]
        if field[0] & 0x80:
            return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        digits = field.strip(b" \0") or b"0"
        if not _OCTAL.fullmatch(digits):  # ``int`` would take a sign, and a size below zero leads back to its header
            raise self._broken(self._at, f"has a member of size {field!r}")
        return int(digits, 8)

    def _pax(self, content: bytes) -> dict[str, str]:
        """Parse records ``length key=value\\n``."""
        records = {}
        at = 0
        while at < len(content) and content[at] != 0:
            space = content.find(b" ", at, at + 20)
            length = int(content[at:space]) if space > at and content[at:space].isdigit() else 0
            key, equals, value = content[space + 1 : at + length - 1].partition(b"=")
            if length <= space - at + 1 or not equals or content[at + length - 1 : at + length] != b"\n":
                raise self._broken(self._at, "has a pax header just before that cannot be read")
            if key in (b"path", b"size", b"GNU.sparse.name"):
                records[key.decode()] = self._text(value)
            elif key.startswith(b"GNU.sparse."):
                records[_IS_SPARSE] = ""
            at += length
        return records

    def _decimal(self, text: str) -> int:
        if not (text.isascii() and text.isdigit()):
            raise self._broken(self._at, f"has a member of size {text!r}")
        return int(text)

    def _text(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            shown = raw.decode(errors="backslashreplace")
            raise BadRequest(
                f"{self._url}: the member name {shown} at byte {self._at} is not UTF-8; rename it in the tar"
            ) from None

    def _broken(self, offset: int, why: str) -> BadRequest:
        return BadRequest(
            f"{self._url} is not a tar, or is damaged: at byte {offset} of {self._size} it {why}; make or copy it again"
        )


def _name(header: bytes) -> bytes:
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0":  # under GNU's own magic, "ustar  ", the prefix field has another meaning
        prefix = header[345:500].split(b"\0", 1)[0]
        return prefix + b"/" + name if prefix else name
    return name
