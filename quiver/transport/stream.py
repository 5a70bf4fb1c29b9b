"""Batched reads on a connection of their own: the body of ``POST /v1/read``, without HTTP around every batch.

A reader upgrades a connection by ``GET /v1/stream``. From then on it sends read requests on it, one after the other,
and the daemon answers each by a frame (docs/protocol.md). A stream needs neither HTTP parsing nor the daemon's event
loop, which for a batch of small samples is most of the cost of a request. If a daemon does not support the upgrade, or
has no stream free, the reader uses HTTP meanwhile.

    request   size u32, then the body of ``POST /v1/read``
    answer    "QRA1", kind u32, size u64; kind 0: a status byte per range, then the bytes of those that are present;
              kind 1: a ``Refusal`` as JSON                                                       all little-endian
"""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec
import numpy as np

from quiver import forks
from quiver.backoff import Backoff
from quiver.errors import Corrupt, OverCapacity, QuiverError, Unauthenticated, answer_of, error_from
from quiver.introduction import HEADER as INTRODUCTION
from quiver.malformed import MALFORMED
from quiver.prepared import prepare
from quiver.transport.attempt import Attempt
from quiver.transport.connection import U8, Connection, Dialogue, Endpoint
from quiver.transport.http import Head, receive_head, tokens
from quiver.transport.idle import Idle
from quiver.transport.liveness import PeerGone
from quiver.wire import ErrorBody, RangeStatus, ReadRequest

PROTOCOL: Final = "quiver-read"
PATH: Final = "/v1/stream"
FRAME: Final = struct.Struct("<4sIQ")
SIZE: Final = struct.Struct("<I")
MAGIC: Final = b"QRA1"
RANGES: Final = 0
REFUSAL: Final = 1
REFUSAL_BYTES_MAX: Final = 1 << 16
HANDSHAKE_SECONDS: Final = 1.0  # a proxy in between may not support the upgrade, and never answer
# How long to read by HTTP from a daemon that refused the upgrade. One that does not support it is rarely asked again;
# one that has no stream free sends its own retry time.
NO_STREAM_SECONDS: Final = 5.0
NO_STREAM_SECONDS_MAX: Final = 60.0
EAGER_BYTES_MAX: Final = 64 << 20  # memory for an answer before its head announces the size
ALIGNED_BYTES: Final = 64


class Refusal(ErrorBody, frozen=True):
    """Why a read was refused. The connection stays open unless the request was malformed."""

    retry_after_seconds: float = 0.0


class NotUpgraded(Exception):
    """The daemon answered and gave no stream. ``retry_after_seconds``: after which to retry, 0 if it did not say."""

    def __init__(self, retry_after_seconds: float = 0.0) -> None:
        super().__init__("no stream")
        self.retry_after_seconds = retry_after_seconds


def refusal_frame(error: QuiverError) -> bytes:
    """Return the answer to a request that failed."""
    told = answer_of(error)
    body = msgspec.json.encode(Refusal(told.code, told.message, told.retry_after_seconds))
    return FRAME.pack(MAGIC, REFUSAL, len(body)) + body


def ranges_frame(statuses: U8, payload_bytes: int) -> bytes:
    """Return what precedes the bytes of the ranges that are present."""
    return FRAME.pack(MAGIC, RANGES, len(statuses) + payload_bytes) + statuses.tobytes()


class ReadStreams:
    """The streams to one daemon, as long as it accepts upgrades. Blocking; safe from threads."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.dialogue = Dialogue(endpoint.failure)
        self.no_stream = Backoff(NO_STREAM_SECONDS, NO_STREAM_SECONDS_MAX)
        self._endpoint = endpoint
        self._bound_to = ""
        self._lock = forks.lock()  # of ``no_stream``

    @property
    def idle(self) -> Idle[Connection]:
        return self.dialogue.idle

    def close(self) -> None:
        self.dialogue.close()

    def read(self, request: ReadRequest, attempt: Attempt | None = None) -> tuple[U8, U8] | None:
        """Read ranges. Return a ``RangeStatus`` per range and the bytes of those present, back to back.

        Returns ``None`` if the caller has to use HTTP for now. Raises the daemon's refusal, ``Corrupt`` for a malformed
        answer, and ``Unavailable``.
        """
        token = self._endpoint.token.token()
        if token != self._bound_to:  # a stream is bound to the token that it was opened with
            self.idle.clear()
            self._bound_to = token
        if self.no_stream.is_waiting and not self.idle.kept:
            return None
        try:
            endpoint = self._endpoint if attempt is None else replace(self._endpoint, attempt=attempt)
            return self.dialogue.run(partial(self._opened, endpoint), partial(read_on, endpoint, request))
        except Unauthenticated:  # by HTTP the daemon tells whether the current token is refused, too
            self.idle.clear()
            return None
        except NotUpgraded as error:
            with self._lock:
                if error.retry_after_seconds > 0:
                    self.no_stream.pause(min(error.retry_after_seconds, NO_STREAM_SECONDS_MAX))
                elif not self.no_stream.is_waiting:  # else another thread has counted this failure
                    self.no_stream.fail()
            return None

    def _opened(self, endpoint: Endpoint) -> Connection:
        connection = open_stream(endpoint)
        with self._lock:
            self.no_stream.succeed()
        return connection


def open_stream(endpoint: Endpoint) -> Connection:
    """Return a new connection that the daemon upgraded to a stream.

    Raises ``NotUpgraded`` if it did not, ``Unavailable`` if it does not answer a health check either.
    """
    connection = endpoint.connect()
    try:
        try:
            _upgrade(connection, endpoint)
        finally:
            connection.end()
    except PeerGone as error:
        connection.close()
        raise endpoint.failure(error, is_answering=False) from error
    except (OSError, ValueError) as error:  # a live daemon that does not upgrade is read by HTTP
        connection.close()
        raise NotUpgraded from error
    except BaseException:
        connection.close()
        raise
    return connection


def _upgrade(connection: Connection, endpoint: Endpoint) -> None:
    patience = endpoint.patience._replace(silence_seconds=HANDSHAKE_SECONDS)
    replace(endpoint, patience=patience).begin(connection)
    upgrade = f"Host: {endpoint.host}\r\nConnection: Upgrade\r\nUpgrade: {PROTOCOL}\r\n"
    authorization = endpoint.authorization(endpoint.token.token())
    said = f"{INTRODUCTION}: {endpoint.introduction}\r\n" if endpoint.introduction else ""
    connection.send(f"GET {PATH} HTTP/1.1\r\n{upgrade}{said}{authorization}\r\n".encode())
    head, behind = receive_head(connection)
    if head.status == Unauthenticated.status:
        raise Unauthenticated(f"{endpoint.url}: {endpoint.token.fault()}")
    if not _is_switched(head) or behind:  # a daemon sends nothing more before the first request
        busy = head.status == OverCapacity.status
        raise NotUpgraded((head.retry_after_seconds or 0.0) if busy else 0.0)
    connection.finish()


def _is_switched(head: Head) -> bool:
    return head.is_http_11 and head.status == 101 and tokens(head.headers, "Upgrade") == [PROTOCOL]


def read_on(endpoint: Endpoint, request: ReadRequest, connection: Connection) -> tuple[U8, U8]:
    """Send a read on a stream; return what ``ReadStreams.read`` returns. Raises what it raises, and ``OSError``."""
    lengths = request.ranges["length"]
    count, wanted = len(lengths), int(lengths.sum())
    body = request.encode()
    endpoint.begin(connection, request.wait_ms / 1000)
    connection.send(SIZE.pack(len(body)), body)
    # Nearly always every range is present. So memory for all of them is allocated before the size of the answer is
    # known, and one call receives the head, the statuses and the first bytes.
    head_bytes = FRAME.size + count
    start = -head_bytes % ALIGNED_BYTES
    buffer = np.empty(start + head_bytes + (wanted if wanted <= EAGER_BYTES_MAX else 0), np.uint8)
    answer = buffer[start:]
    received = _receive_at_least(connection, answer, 0, FRAME.size)
    magic, kind, size = FRAME.unpack_from(answer.data)
    if magic != MAGIC or kind not in (RANGES, REFUSAL):
        raise Corrupt("malformed answer: bad magic", endpoint.name)
    if kind == REFUSAL:
        raise _refusal(connection, endpoint, bytes(answer[FRAME.size : received]), size)
    if size < count:
        raise Corrupt(f"an answer of {size} bytes to {count} ranges", endpoint.name)
    received = _receive_at_least(connection, answer, received, head_bytes)
    statuses = answer[FRAME.size : head_bytes].copy()
    is_whole = not statuses.any()  # ``RangeStatus.PRESENT`` is 0
    present = wanted if is_whole else int(lengths[statuses == RangeStatus.PRESENT].sum())
    if size != count + present or received > head_bytes + present:
        raise Corrupt(f"an answer of {size} bytes where {count + present} belong", endpoint.name)
    data = answer[head_bytes : head_bytes + present]
    if len(data) < present:  # it was not allocated before the statuses were known
        data = np.empty(present, np.uint8)
    connection.receive(data[received - head_bytes :].data)
    connection.finish()
    return statuses, data


def _receive_at_least(connection: Connection, out: U8, received: int, wanted: int) -> int:
    """Receive into ``out``, which has ``received`` bytes, until it has ``wanted`` or more; return how many it has."""
    while received < wanted:
        received += connection.receive_some(out[received:].data)
    return received


def _refusal(connection: Connection, endpoint: Endpoint, begin: bytes, size: int) -> QuiverError:
    """Return the daemon's refusal as an error. ``begin``: what was received of its ``size`` bytes."""
    if size > REFUSAL_BYTES_MAX or len(begin) > size:
        raise Corrupt(f"a refusal of {size} bytes", endpoint.name)
    body = bytearray(size)
    body[: len(begin)] = begin
    connection.receive(memoryview(body)[len(begin) :])
    try:
        told = msgspec.json.decode(body, type=Refusal)
    except MALFORMED as error:
        raise Corrupt(f"malformed refusal: {error}", endpoint.name) from error
    if told.error == OverCapacity.code:  # after other errors the daemon may close the connection
        connection.finish()
    return error_from(told.error, told.message, endpoint.url, retry_after_seconds=told.retry_after_seconds)


prepare(Refusal)
