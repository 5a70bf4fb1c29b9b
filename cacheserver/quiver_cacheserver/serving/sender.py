"""Sends answers to readers: one loop for all of them, on streams and by HTTP.

A worker of the poller sends on a connection for a limited stint. A reader that accepts nothing for a moment goes back
to the poller with the rest of its answer, and occupies no thread. A failure after the answer has begun can only cut the
connection: the reader would take an error message for the announced bytes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import Final

from aiohttp import web

from quiver.digest import Digest
from quiver.errors import DiskFailed, OverCapacity, QuiverError
from quiver.transport.liveness import SLOWEST_BYTES_PER_SECOND
from quiver.transport.sockets import NotReady
from quiver_cacheserver.counters import Counters
from quiver_cacheserver.node import Node
from quiver_cacheserver.serving.payload import Payload
from quiver_cacheserver.serving.poller import AGAIN, ENDED, WRITABLE, Channel, Poller
from quiver_cacheserver.serving.requests import caller_of
from quiver_cacheserver.serving.tls import TlsTransport

log = logging.getLogger(__name__)

STINT_BYTES: Final = 16 << 20  # then it is the next reader's turn
STINT_SECONDS: Final = 1.0  # likewise: a slow reader may accept a little at a time and never block
SEND_SECONDS_MAX: Final = 60.0  # without progress, and of delay in all: see ``Sending``


class Sending:
    """The progress of an answer: counts the bytes sent, and sets the deadline for the rest.

    A reader that accepts a little now and then could otherwise occupy one of the concurrent reads for as long as it
    likes. So sending may take no longer than at the minimum rate, below which readers themselves give up.
    """

    __slots__ = ("_counters", "_head_bytes", "_until", "payload")

    def __init__(self, payload: Payload, counters: Counters) -> None:
        self.payload = payload
        self._counters = counters
        self._head_bytes = payload.head_bytes  # which are not counted
        self._until = time.monotonic() + SEND_SECONDS_MAX

    @property
    def deadline(self) -> float:
        """When the reader must have accepted more, by ``time.monotonic``."""
        return min(self._until, time.monotonic() + SEND_SECONDS_MAX)

    def stint(self, sock: socket.socket) -> int:
        """In a worker: send what the reader accepts, for a stint; return the events to wait for, or ``AGAIN``.

        0: all is sent. Raises ``OSError`` of the connection, and ``DiskFailed``.
        """
        payload, total = self.payload, 0
        ends_at = time.monotonic() + STINT_SECONDS
        try:
            while not payload.done:
                if total >= STINT_BYTES or time.monotonic() >= ends_at:
                    return AGAIN
                total += payload.send(sock)
        except NotReady as wait:
            return wait.events
        finally:
            self._took(total)
        return 0

    def _took(self, count: int) -> None:
        of_head = min(count, self._head_bytes)
        self._head_bytes -= of_head
        if count > of_head:
            self._counters.add("served_bytes", count - of_head)
        self._until += count / SLOWEST_BYTES_PER_SECOND


class _Answer(Channel):
    """The rest of an answer by HTTP, on a descriptor beside the transport that owns the connection.

    Of TLS there is no second descriptor: the transport lends its socket and gets it back, open (``lender``).
    """

    __slots__ = ("_done", "_error", "_lender", "_loop", "_sending")

    def __init__(self, transport: asyncio.Transport, client: str, sending: Sending, done: asyncio.Future[None]) -> None:
        self._lender = transport if isinstance(transport, TlsTransport) else None
        super().__init__(own_socket(transport), client, sending.deadline)
        self._sending = sending
        self._done = done
        self._loop = done.get_loop()
        self._error: Exception | None = ConnectionAbortedError("the daemon ends")

    def serve(self) -> int:
        try:
            if self.late:
                raise TimeoutError("the reader does not take it in time")
            events = self._sending.stint(self.sock)
        except (OSError, QuiverError) as error:
            self._error = error
            return ENDED
        if events:
            self.deadline = self._sending.deadline
            return events
        self._error = None
        return ENDED

    def close(self) -> None:
        if self._lender is None:
            super().close()

    def ended(self) -> None:
        self._loop.call_soon_threadsafe(self._tell)

    def give_back(self) -> None:
        """On the event loop: release the socket of an answer that the poller did not take, or has ended."""
        if self._lender is not None:
            self._lender.take_back()
        elif self.sock.fileno() >= 0:
            self.sock.close()

    def _tell(self) -> None:
        self.give_back()
        if self._done.done():
            pass
        elif self._error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(self._error)


class Sender:
    """Sends answers by HTTP: the head by aiohttp, the payload as on a stream."""

    def __init__(self, node: Node, poller: Poller) -> None:
        self._node = node
        self._poller = poller

    async def respond(
        self, request: web.Request, headers: dict[str, str], first: bytes, payload: Payload | None
    ) -> web.StreamResponse:
        """Answer with ``first`` and the payload behind it, which ``headers`` announce."""
        response = web.StreamResponse(headers=headers)
        transport = request.transport
        if transport is None:
            return response  # the reader has left; the server notices when it starts to send
        transport.set_write_buffer_limits(0)  # drained data has left the process: the rest bypasses the transport
        try:
            async with asyncio.timeout(SEND_SECONDS_MAX):
                writer = await response.prepare(request)
                assert writer is not None
                if first:
                    await writer.write(first)
                await writer.drain()
            if payload is not None and payload.size_bytes:
                await self._send(transport, payload, caller_of(request).budget)
        except (OSError, QuiverError) as error:
            suspect_if_damaged(self._node, error, payload.shards if payload is not None else ())
            transport.abort()
            response.force_close()
            return response  # an error raised here would be logged again, with a traceback for each reader that leaves
        await response.write_eof()
        return response

    async def _send(self, transport: asyncio.Transport, payload: Payload, client: str) -> None:
        """Send a payload. Raises ``OSError`` and ``DiskFailed``; the connection is then unusable."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answer = _Answer(transport, client, Sending(payload, self._node.counters), done)
        try:
            self._poller.add(answer, WRITABLE)
        except BaseException:
            answer.give_back()
            raise
        try:
            await done
        except asyncio.CancelledError:
            self._poller.end(answer)  # no worker may send on it any more
            raise


def own_socket(transport: asyncio.Transport) -> socket.socket:
    """Return a socket on a connection for a channel: of TLS the transport's, which it lends, else one of our own.

    Raises ``OverCapacity`` without a descriptor for it.
    """
    if isinstance(transport, TlsTransport):
        return transport.lend()
    try:
        fd = os.dup(transport.get_extra_info("socket").fileno())
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise OverCapacity("no descriptor is left; retry later", SEND_SECONDS_MAX) from error
        raise ConnectionResetError("the reader is gone") from error
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)
    return sock


def suspect_if_damaged(node: Node, error: OSError | QuiverError, shards: Sequence[Digest]) -> None:
    """On the event loop: log why an answer ends early; have its shards verified again if that is the disk's fault.

    Otherwise every reader of them would be cut off.
    """
    if log_cut(error):
        node.verification.suspect(shards)


def log_cut(error: OSError | QuiverError) -> bool:
    """Log why an answer ends early; return whether its shards are to be verified again."""
    gone = isinstance(error, ConnectionError)  # thousands of readers may leave, which is no fault here
    level = logging.DEBUG if gone else logging.WARNING
    log.log(level, "an answer was cut off: %s", str(error) or "the reader does not take it")
    return isinstance(error, DiskFailed)
