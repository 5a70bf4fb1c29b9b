"""``GET /v1/stream``: connections that carry batched reads and nothing else.

An idle stream is a file descriptor in the poller and a few hundred bytes. A read of shards that are resident, which is
nearly every one, is answered without the event loop: the worker that the request woke reads it from the socket, and
passes the head of the answer and slices of the files to the kernel in one call. A read that needs fills first becomes a
coroutine on the loop, as with any other route, and no thread waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from functools import partial
from math import inf
from typing import Final

from aiohttp import HttpVersion11, web

from quiver.errors import BadRequest, OverCapacity, QuiverError, Unauthenticated, Unavailable
from quiver.transport.sockets import NotReady, receive_some, unread_bytes
from quiver.transport.stream import PROTOCOL, SIZE, ranges_frame, refusal_frame
from quiver.wire import READ_REQUEST_BYTES_MAX, ReadRequest
from quiver_cacheserver.access.caller import Caller
from quiver_cacheserver.access.rights import STREAM_READ
from quiver_cacheserver.budget import Resource
from quiver_cacheserver.node import Node
from quiver_cacheserver.residency.readers import ReadBy
from quiver_cacheserver.serving.payload import Payload
from quiver_cacheserver.serving.poller import AGAIN, ENDED, PARKED, READABLE, WRITABLE, Channel, Poller
from quiver_cacheserver.serving.reads import ReadAnswer, at_hand, gather, unpacked
from quiver_cacheserver.serving.requests import BODY_SECONDS_MAX, caller_of, read_by, unhurried
from quiver_cacheserver.serving.sender import Sending, log_cut, own_socket
from quiver_cacheserver.serving.tls import TlsTransport
from quiver_cacheserver.serving.turns import Places, Turn

log = logging.getLogger(__name__)

IDLE_SECONDS: Final = 120.0
PIECE_BYTES: Final = 64 << 10  # received at a time; a request takes memory as it arrives, whatever size it announces
ANSWER_SECONDS_MAX: Final = 90.0  # the longest wait that a reader may ask for, and what looking a manifest up takes
NO_STREAM_SECONDS: Final = 60.0
NOTHING: Final = -1  # held: a request may announce a body of 0 bytes

_worker = threading.local()


class Streams:
    """The open streams of a daemon."""

    def __init__(self, node: Node, poller: Poller, reading: Places) -> None:
        self.node = node
        self.poller = poller
        self.reading = reading
        self._gathering: set[asyncio.Task[None]] = set()
        self._closed = False

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Switch a connection to the protocol, and hand it to the poller. The handler ends then."""
        transport = request.transport
        if not _is_upgrade(request):
            raise BadRequest(f"upgrade an HTTP/1.1 connection to {PROTOCOL} and send no body, or POST /v1/read")
        caller, budgets = caller_of(request), self.node.budgets
        if self._closed or transport is None or not budgets.hold(caller.budget, Resource.STREAMS):
            raise OverCapacity(
                "as many streams are open here as this address may have; POST /v1/read", NO_STREAM_SECONDS
            )
        try:
            return await self._switch(request, transport, caller)
        except BaseException:
            budgets.release(caller.budget, Resource.STREAMS)
            raise

    async def _switch(self, request: web.Request, transport: asyncio.Transport, caller: Caller) -> web.StreamResponse:
        """Answer 101 and give the connection to a ``Stream``. Raises ``OSError`` if the reader is gone before that."""
        # The socket of TLS is the transport's until the 101 is sent.
        sock = None if isinstance(transport, TlsTransport) else own_socket(transport)
        try:
            transport.set_write_buffer_limits(0)
            transport.pause_reading()  # from here on a worker reads
            response = web.StreamResponse(status=101, headers={"Connection": "Upgrade", "Upgrade": PROTOCOL})
            async with asyncio.timeout(BODY_SECONDS_MAX):
                writer = await response.prepare(request)
                assert writer is not None
                await writer.drain()
            unhurried(request)
            if isinstance(transport, TlsTransport):
                sock = transport.detach()
            else:
                transport.abort()  # closes its descriptor of the connection, and not ours
            assert sock is not None
            events = WRITABLE if unread_bytes(sock) else READABLE  # no event tells of what was received already
            self.poller.add(Stream(self, asyncio.get_running_loop(), sock, caller, read_by(request)), events)
        except TimeoutError as error:
            transport.abort()
            if sock is not None:
                sock.close()
            raise ConnectionResetError("the reader does not take the answer to its upgrade") from error
        except BaseException:
            if sock is not None:
                sock.close()
            raise
        return response

    def close(self) -> None:
        """End all streams. What is being sent is cut off."""
        self._closed = True
        for task in self._gathering:
            task.cancel()
        self.poller.end_all(Stream)

    # -- from workers -------------------------------------------------------------------------------------------------

    def gather(self, stream: Stream, asked: ReadRequest, turn: Turn) -> None:
        """Answer a read on the event loop, and resume its stream then."""
        stream.loop.call_soon_threadsafe(self._begin, stream, asked, turn)

    def suspect(self, stream: Stream, payload: Payload) -> None:
        """Have shards verified again that the disk could not read."""
        stream.loop.call_soon_threadsafe(self.node.verification.suspect, payload.shards)

    # -- on the event loop --------------------------------------------------------------------------------------------

    def _begin(self, stream: Stream, asked: ReadRequest, turn: Turn) -> None:
        task = asyncio.get_running_loop().create_task(self._gather(stream, asked, turn))
        self._gathering.add(task)
        task.add_done_callback(partial(self._end, stream))
        if self._closed:
            task.cancel()

    async def _gather(self, stream: Stream, asked: ReadRequest, turn: Turn) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                stream.answer = await gather(self.node, asked, turn)
        except TimeoutError:
            stream.refusal = Unavailable(self.node.url, "does not complete a request in time; retry")
        except QuiverError as error:
            stream.refusal = error
        except Exception:  # a supervisor: a bug costs this read, and not the daemon
            log.exception("a read failed")
            stream.refusal = QuiverError("the read failed unexpectedly; see the daemon's log")

    def _end(self, stream: Stream, task: asyncio.Task[None]) -> None:
        self._gathering.discard(task)
        self.poller.resume(stream)


class Stream(Channel):
    """One stream: at any time idle, receiving a request, waiting for the event loop's answer, or sending one.

    ``answer`` or ``refusal``: what the event loop made of a read that it was given. A task that was cancelled leaves
    neither, which ends the stream.
    """

    __slots__ = (
        "_arriving_until", "_body_bytes", "_ends", "_received", "_sending", "_streams", "_turn", "answer", "by",
        "caller", "loop",
        "refusal",
    )  # fmt: skip

    def __init__(
        self, streams: Streams, loop: asyncio.AbstractEventLoop, sock: socket.socket, caller: Caller, by: ReadBy
    ) -> None:
        super().__init__(sock, caller.budget, time.monotonic() + IDLE_SECONDS)
        self.caller = caller
        self.by = by
        self.loop = loop
        self.answer: ReadAnswer | None = None
        self.refusal: QuiverError | None = None
        self._streams = streams
        self._received: bytearray | None = None  # of requests that are not complete yet
        self._arriving_until = inf  # the request is to be complete
        self._body_bytes = NOTHING  # held for the request that arrives or is answered, and for what was sent ahead
        self._turn: Turn | None = None
        self._sending: Sending | None = None
        self._ends = False  # after what is being sent

    def serve(self) -> int:
        try:
            if self._sending is not None:
                return self._send(self._sending)
            if self._turn is not None:
                return self._resumed()
            return self._receive()
        except OSError as error:
            log.debug("a stream ended: %s", error)
            return ENDED

    def ended(self) -> None:
        node = self._streams.node
        if self.late and self._sending is None:
            node.counters.count("connections_closed", "late" if self._received else "idle")
        self._settle()
        node.budgets.release(self.client, Resource.STREAMS)

    # -- a request ----------------------------------------------------------------------------------------------------

    def _receive(self) -> int:
        """Receive what there is of a request; answer it once it is complete."""
        buffer = _buffer()
        while True:
            if self._received is not None and len(self._received) >= SIZE.size:
                size = SIZE.unpack_from(self._received)[0]
                refusal = self._refusal_of(size)
                if refusal is not None:
                    self._ends = True  # its body is not read, so no request can follow
                    return self._refuse(refusal)
                if len(self._received) >= SIZE.size + size:
                    return self._begin(self._received, SIZE.size + size)
            try:
                count = receive_some(self.sock, buffer)
            except NotReady as wait:
                self.deadline = self._patience()
                return wait.events
            if not count:
                return ENDED
            if self._received is None:
                self._received = bytearray(buffer[:count])
            else:
                self._received += buffer[:count]

    def _refusal_of(self, size: int) -> QuiverError | None:
        """Reserve memory for the body of a request; return why it is refused, if it is."""
        budgets = self._streams.node.budgets
        if size > READ_REQUEST_BYTES_MAX:
            return BadRequest(f"a request of {size} bytes; {READ_REQUEST_BYTES_MAX} are the most")
        if self._body_bytes == NOTHING:
            if not budgets.hold(self.client, Resource.BODY_BYTES, size):
                return budgets.refusal(Resource.BODY_BYTES)
            self._body_bytes = size
        return None

    def _patience(self) -> float:
        """Return until when to wait for the reader: longer for a new request than for the rest of one."""
        now = time.monotonic()
        if not self._received:
            return now + IDLE_SECONDS
        self._arriving_until = min(self._arriving_until, now + BODY_SECONDS_MAX)
        return self._arriving_until

    def _begin(self, received: bytearray, size: int) -> int:
        """Answer a request, or have the event loop do so."""
        self._received, self._arriving_until = received[size:] or None, inf
        node, ahead_bytes = self._streams.node, len(received) - size
        if ahead_bytes and not node.budgets.hold(self.client, Resource.BODY_BYTES, ahead_bytes):
            self._ends = True  # what was sent ahead is not kept
            return self._refuse(node.budgets.refusal(Resource.BODY_BYTES))
        self._body_bytes += ahead_bytes
        turn = Turn(self._streams.reading, node.counters, self.caller, self.by)
        try:
            node.access.check(self.caller, STREAM_READ)
            turn.begin()
            self._turn = turn
            asked = unpacked(node, memoryview(received)[SIZE.size : size], self.client)
            answer = at_hand(node, asked, turn)
        except QuiverError as error:
            return self._refuse(error)
        if answer is None:
            self._streams.gather(self, asked, turn)  # and from here on this is not the worker's
            return PARKED
        return self._reply(answer)

    def _resumed(self) -> int:
        """Send what the event loop made of the request."""
        answer, refusal = self.answer, self.refusal
        self.answer = self.refusal = None
        if refusal is not None:
            return self._refuse(refusal)
        return ENDED if answer is None else self._reply(answer)

    # -- its answer ---------------------------------------------------------------------------------------------------

    def _reply(self, answer: ReadAnswer) -> int:
        head = ranges_frame(answer.statuses, answer.size_bytes)
        return self._send(Sending(answer.payload(head), self._streams.node.counters))

    def _refuse(self, error: QuiverError) -> int:
        self._ends = self._ends or isinstance(error, (BadRequest, Unauthenticated))
        return self._send(Sending(Payload.of(refusal_frame(error)), self._streams.node.counters))

    def _send(self, sending: Sending) -> int:
        """Send as much of an answer as the reader takes. What fails here can only cut it off: see ``sender``."""
        self._sending = sending
        try:
            if self.late:
                raise TimeoutError("the reader is too slow")
            events = sending.stint(self.sock)
        except (OSError, QuiverError) as error:
            if log_cut(error):
                self._streams.suspect(self, sending.payload)
            return ENDED
        if events:
            self.deadline = sending.deadline
            return events
        self._settle()
        if self._ends:
            return ENDED
        self.deadline = self._patience()
        # No event tells of what was received already.
        return AGAIN if self._received or unread_bytes(self.sock) else READABLE

    def _settle(self) -> None:
        """Release what the request held."""
        self._sending = None
        if self._turn is not None:
            self._turn.end()
            self._turn = None
        if self._body_bytes != NOTHING:
            self._streams.node.budgets.release(self.client, Resource.BODY_BYTES, self._body_bytes)
            self._body_bytes = NOTHING


def _buffer() -> memoryview:
    """Return this worker's buffer to receive into."""
    try:
        return _worker.buffer  # type: ignore[no-any-return]
    except AttributeError:
        _worker.buffer = memoryview(bytearray(PIECE_BYTES))
        return _worker.buffer  # type: ignore[no-any-return]


def _is_upgrade(request: web.Request) -> bool:
    """Whether a request asks for a stream: what it says of a body would be taken for the stream's first request."""
    wishes = ",".join(request.headers.getall("Connection", [])).lower().split(",")
    has_body = request.body_exists or request.content_length or "Transfer-Encoding" in request.headers
    return (
        request.version == HttpVersion11
        and "upgrade" in [wish.strip() for wish in wishes]
        and request.headers.get("Upgrade", "").lower() == PROTOCOL
        and not has_body
    )
