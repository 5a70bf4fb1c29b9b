"""Batched reads on a connection of their own: what ``POST /v1/read`` says, without HTTP around every batch.

A reader asks ``GET /v1/stream`` to upgrade a connection and from then on sends read requests on it, one after the
other, each answered by a frame (docs/protocol.md). It saves both ends the parsing of HTTP and the daemon its event
loop: for a batch of small samples that is most of what a request costs. A daemon that does not take the upgrade, or has
no connection to spare, is asked by HTTP.

    request   size u32, then the body of ``POST /v1/read``
    answer    "QRA1", kind u32, size u64; kind 0: a status byte per range, then the bytes of those that are present;
              kind 1: a ``Refusal`` as JSON                                                       all little-endian
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import Final
from urllib.parse import urlsplit

import msgspec
import numpy as np
import numpy.typing as npt

from quiver.errors import BadRequest, BrokenOff, Corrupt, OverCapacity, QuiverError, Unavailable
from quiver.transport.idle import Idle, no_answer, unreachable
from quiver.transport.liveness import SLOWEST_BYTES_PER_SECOND, Gone, Patience, Vigil
from quiver.wire import ErrorBody, RangeStatus, ReadRequest, message_of

PROTOCOL: Final = "quiver-read"
PATH: Final = "/v1/stream"
FRAME: Final = struct.Struct("<4sIQ")
SIZE: Final = struct.Struct("<I")
MAGIC: Final = b"QRA1"
RANGES: Final = 0
REFUSAL: Final = 1
REFUSAL_BYTES_MAX: Final = 1 << 16
HEAD_BYTES_MAX: Final = 8 << 10
HANDSHAKE_SECONDS: Final = 1.0  # what stands between may not know how to upgrade, and say nothing at all
NO_STREAM_SECONDS: Final = 60.0  # a daemon that took no upgrade is asked by HTTP meanwhile
U8 = npt.NDArray[np.uint8]


class _EndedEarly(ConnectionResetError):
    """The daemon closed the connection in the middle of an answer."""


class Refusal(ErrorBody, frozen=True):
    """Why a read was not answered; the connection goes on unless the request was a bad one."""

    retry_after_seconds: float = 0.0


def refusal_frame(error: QuiverError) -> bytes:
    after = error.retry_after_seconds if isinstance(error, OverCapacity) else 0.0
    body = msgspec.json.encode(Refusal(error.code, message_of(error), after))
    return FRAME.pack(MAGIC, REFUSAL, len(body)) + body


def ranges_frame(statuses: U8, payload_bytes: int) -> bytes:
    """Return what comes before the bytes of the ranges that are present."""
    return FRAME.pack(MAGIC, RANGES, len(statuses) + payload_bytes) + statuses.tobytes()


class ReadStream:
    """The reader's end. Blocking; belongs to one thread at a time and to the process that opened it."""

    def __init__(self, sock: socket.socket, url: str, name: str, patience: Patience) -> None:
        self._socket = sock
        self._url = url
        self._name = name
        self._patience = patience
        self._answering = False  # the head of an answer is here

    @classmethod
    def upgraded(cls, sock: socket.socket, url: str, name: str, patience: Patience) -> ReadStream | None:
        """Return the stream that a new connection becomes; ``None``, and it is closed, if the daemon does not do that.

        Raises ``OSError`` if there is no answer at all; ``Gone`` if the daemon answers nothing else either.
        """
        done = False
        host = urlsplit(url).netloc
        try:
            sock.settimeout(HANDSHAKE_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(
                f"GET {PATH} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: {PROTOCOL}\r\n\r\n".encode()
            )
            if not _is_switched(_head(sock, Vigil(url, patience))):
                return None
            sock.settimeout(None)  # from here on the kernel keeps the time: see _receive
            done = True
            return cls(sock, url, name, patience)
        finally:
            if not done:
                sock.close()

    def close(self) -> None:
        self._socket.close()

    def read(self, request: ReadRequest) -> tuple[U8, U8]:
        """Ask for ranges. Return a ``RangeStatus`` per range and the bytes of those present, back to back.

        Raises what the daemon refused with; ``Corrupt`` for a wrong answer, and ``OSError``: then the stream is over.
        """
        body = request.encode()
        self._answering = False
        wait_seconds = request.wait_ms / 1000
        patience_seconds = self._patience.silence_seconds + wait_seconds
        vigil = Vigil(self._url, self._patience, wait_seconds)
        self._send(memoryview(SIZE.pack(len(body)) + body), time.monotonic() + patience_seconds, vigil)
        count = len(request.ranges)
        deadline = time.monotonic() + patience_seconds
        head = bytearray(FRAME.size)
        self._receive(memoryview(head), deadline, vigil)
        self._answering = True
        magic, kind, size = FRAME.unpack(head)
        if magic != MAGIC or kind not in (RANGES, REFUSAL):
            raise Corrupt("an answer that is none", self._name)
        if kind == REFUSAL:
            self._refused(size, deadline, vigil)
        if size < count:
            raise Corrupt(f"an answer of {size} bytes to {count} ranges", self._name)
        statuses = np.empty(count, np.uint8)
        self._receive(statuses.data, deadline, vigil)
        present = int(request.ranges["length"][statuses == RangeStatus.PRESENT].sum())
        if size != count + present:
            raise Corrupt(f"an answer of {size} bytes where {count + present} belong", self._name)
        data = np.empty(present, np.uint8)
        self._receive(data.data, deadline + present / SLOWEST_BYTES_PER_SECOND, vigil)
        return statuses, data

    def _refused(self, size: int, deadline: float, vigil: Vigil) -> None:
        if size > REFUSAL_BYTES_MAX:
            raise Corrupt(f"a refusal of {size} bytes", self._name)
        body = bytearray(size)
        self._receive(memoryview(body), deadline, vigil)
        try:
            told = msgspec.json.decode(body, type=Refusal)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise Corrupt(f"a refusal that cannot be read ({error})", self._name) from error
        if told.error == OverCapacity.code:
            raise OverCapacity(f"{self._name}: {told.message}", min(max(told.retry_after_seconds, 0.0), 60.0))
        if told.error == BadRequest.code:
            raise BadRequest(f"{self._name}: {told.message}")
        raise Unavailable(self._name, f"answers {told.error}: {told.message}")

    def _send(self, data: memoryview, deadline: float, vigil: Vigil) -> None:
        """Send all of it by the deadline: ``sendall`` has none while a byte goes now and then."""
        while data:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("takes no request")
            self._wait("SNDTIMEO", min(left, vigil.wait_seconds()))
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                vigil.check(self._socket)

    def _receive(self, out: memoryview, deadline: float, vigil: Vigil) -> None:
        """Fill ``out`` in as few calls as the kernel makes of it. Neither silence nor a trickle is waited for long."""
        while out:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("answers too slowly")
            self._wait("RCVTIMEO", min(left, vigil.wait_seconds()))
            try:
                count = self._socket.recv_into(out, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                vigil.check(self._socket)
                continue
            if not count:
                ended = _EndedEarly if self._answering else ConnectionResetError
                raise ended(f"the answer ends {len(out)} bytes early")
            vigil.heard()
            out = out[count:]

    def _wait(self, option: str, seconds: float) -> None:
        microseconds = max(int(seconds * 1e6), 1000)
        self._socket.setsockopt(
            socket.SOL_SOCKET, getattr(socket, f"SO_{option}"), struct.pack("ll", *divmod(microseconds, 1_000_000))
        )


class ReadStreams:
    """The streams to one daemon, as long as it takes upgrades. Blocking; safe from threads."""

    def __init__(self, url: str, name: str, patience: Patience) -> None:
        self.idle: Idle[ReadStream] = Idle()
        self.none_until = 0.0  # monotonic seconds
        self._url = url
        self._name = name
        self._patience = patience

    def close(self) -> None:
        self.idle.close()

    def read(self, request: ReadRequest) -> tuple[U8, U8] | None:
        """``ReadStream.read``; ``None`` if reads go by HTTP for now. Raises ``Unavailable`` for ``OSError``."""
        stream = self.idle.take()
        if stream is not None:
            with contextlib.suppress(ConnectionError):
                return self._read_by(stream, request)
            # The daemon closed an idle connection just then: not its fault, ask once more.
        elif time.monotonic() < self.none_until:
            return None
        stream = self._opened()
        if stream is None:
            return None
        try:
            return self._read_by(stream, request)
        except _EndedEarly as error:
            raise BrokenOff(self._url, f"{error}; the daemon died, or what it holds is damaged") from error
        except ConnectionError as error:
            raise no_answer(self._url, error) from error

    def _read_by(self, stream: ReadStream, request: ReadRequest) -> tuple[U8, U8]:
        """Read, and keep the stream if it can be used again. Lets ``ConnectionError`` through."""
        good = False
        try:
            answer = stream.read(request)
            good = True
        except OverCapacity:
            good = True
            raise
        except ConnectionError:
            raise
        except OSError as error:
            raise no_answer(self._url, error) from error
        finally:
            if good:
                self.idle.keep(stream)
            else:
                stream.close()
        return answer

    def _opened(self) -> ReadStream | None:
        parts = urlsplit(self._url)
        try:
            address = parts.hostname or "", parts.port or 80
            sock = socket.create_connection(address, self._patience.connect_seconds)
        except OSError as error:
            raise unreachable(self._url, error) from error
        stream = None
        try:
            stream = ReadStream.upgraded(sock, self._url, self._name, self._patience)
        except Gone as error:
            raise no_answer(self._url, error) from error
        except OSError:
            pass  # what is alive and takes no upgrade is asked by HTTP
        if stream is None:
            self.none_until = time.monotonic() + NO_STREAM_SECONDS
        return stream


def _head(sock: socket.socket, vigil: Vigil) -> bytes:
    """Return an answer's head, and whatever a daemon that is none sends behind it."""
    head = b""
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    while b"\r\n\r\n" not in head and len(head) < HEAD_BYTES_MAX and (left := deadline - time.monotonic()) > 0:
        sock.settimeout(min(left, vigil.wait_seconds()))
        try:
            more = sock.recv(HEAD_BYTES_MAX)
        except TimeoutError:
            vigil.check(sock)
            continue
        if not more:
            break
        head += more
        vigil.heard()
    return head


def _is_switched(head: bytes) -> bool:
    if not head.endswith(b"\r\n\r\n"):  # a daemon says nothing more until it is asked
        return False
    lines = head.decode("latin-1").split("\r\n")
    named = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    return lines[0].split(" ")[:2] == ["HTTP/1.1", "101"] and named.get("upgrade", "").lower() == PROTOCOL
