"""Where an answer's head, body and end are in the bytes that a daemon sends: HTTP/1.1, and after an upgrade the stream.

A toxic that changes a length or appends garbage after a body has to know. What is neither HTTP nor a stream (TLS, gRPC)
passes as ``RAW`` from the first byte that does not parse on.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from enum import Enum
from typing import Final, NamedTuple

from quiver.transport.stream import FRAME, MAGIC

HEAD_BYTES_MAX: Final = 64 << 10
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_METHOD: Final = re.compile(rb"(GET|HEAD|POST|PUT|DELETE) \S+ HTTP/1\.1\r\n")
_METHODS: Final = (b"GET /", b"HEAD /", b"POST /", b"PUT /", b"DELETE /")
_UNTIL_CLOSE: Final = 1 << 62


class Part(Enum):
    HEAD = "head"  # of an HTTP answer
    FRAME = "frame"  # the head of an answer on a stream
    BODY = "body"
    END = "end"  # without bytes, after the last one of a body
    RAW = "raw"  # unknown


class Piece(NamedTuple):
    part: Part
    data: bytes


class Requests:
    """The methods of the requests that a client sent: the answer to HEAD has no body, whatever its head says."""

    def __init__(self) -> None:
        self.methods: deque[bytes] = deque()
        self._body_left = 0
        self._head = b""
        self._known = True  # that it is HTTP so far

    def feed(self, data: bytes) -> None:
        while data and self._known:
            if self._body_left:
                taken = min(self._body_left, len(data))
                self._body_left -= taken
                data = data[taken:]
                continue
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if (len(head) >= 8 and not head.startswith(_METHODS)) or len(head) > HEAD_BYTES_MAX:
                self._known = False  # a stream, TLS or gRPC
                return
            if not found:
                return
            self._head = b""
            method = _METHOD.match(head + b"\r\n")
            self.methods.append(method[1] if method else b"")
            length = _LENGTH.search(head)
            self._body_left = int(length[1]) if length else 0


class Answers:
    """Cuts what a daemon sends into pieces."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._state = Part.HEAD
        self._buffer = b""
        self._left = 0

    def pieces(self, data: bytes) -> Iterator[Piece]:
        while data or (self._state is Part.BODY and not self._left):
            if self._state is Part.RAW:
                yield Piece(Part.RAW, data)
                return
            if self._state is Part.BODY:
                body, data = data[: self._left], data[self._left :]
                self._left -= len(body)
                if body:
                    yield Piece(Part.BODY, body)
                if not self._left:
                    self._state = self._next
                    yield Piece(Part.END, b"")
                continue
            self._buffer, data = self._buffer + data, b""
            piece = self._frame() if self._state is Part.FRAME else self._head()
            if piece is None:
                return
            data, self._buffer = self._buffer, b""
            yield piece

    def _head(self) -> Piece | None:
        if not b"HTTP/1.1 ".startswith(self._buffer[:9]) and not self._buffer.startswith(b"HTTP/1.1 "):
            return self._raw()
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return self._raw() if len(self._buffer) > HEAD_BYTES_MAX else None
        self._buffer = rest
        status = int(head[9:12]) if head[9:12].isdigit() else 0
        method = self._requests.methods.popleft() if self._requests.methods else b"GET"
        if status == 101:
            self._state = Part.FRAME
            return Piece(Part.HEAD, head + found)
        length = _LENGTH.search(head)
        empty = method == b"HEAD" or status in (204, 304)
        self._left = 0 if empty else int(length[1]) if length else _UNTIL_CLOSE
        self._state, self._next = Part.BODY, Part.HEAD
        return Piece(Part.HEAD, head + found)

    def _frame(self) -> Piece | None:
        if len(self._buffer) < FRAME.size:
            return None
        head, self._buffer = self._buffer[: FRAME.size], self._buffer[FRAME.size :]
        magic, _, size = FRAME.unpack(head)
        if magic != MAGIC:
            self._buffer = head + self._buffer
            return self._raw()
        self._left, self._state, self._next = size, Part.BODY, Part.FRAME
        return Piece(Part.FRAME, head)

    def _raw(self) -> Piece:
        piece, self._buffer, self._state = Piece(Part.RAW, self._buffer), b"", Part.RAW
        return piece
