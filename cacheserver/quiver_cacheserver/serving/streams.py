"""``GET /v1/stream``: connections that carry batched reads and nothing else, each served by a thread of its own.

A read of shards that are here, which is nearly every one, is answered without the event loop: the thread takes the
request off the socket, and gives the kernel the head of the answer and slices of the files in one call. What has to be
brought in is asked of the loop, as any other route does, and waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import select
import socket
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Final

from aiohttp import HttpVersion11, web

from quiver.errors import BadRequest, OverCapacity, QuiverError, Unavailable
from quiver.stream import PROTOCOL, SIZE, ranges_frame, refusal_frame
from quiver.wire import READ_REQUEST_BYTES_MAX, ReadRequest
from quiver_cacheserver.budget import Resource
from quiver_cacheserver.node import Node
from quiver_cacheserver.serving.payload import Payload
from quiver_cacheserver.serving.reads import BODY_SECONDS_MAX, Answer, Taking, at_hand, cut_off, gather, unpacked
from quiver_cacheserver.serving.requests import client_of, unhurried
from quiver_cacheserver.serving.turns import Turn

log = logging.getLogger(__name__)

IDLE_SECONDS: Final = 120.0
PIECE_BYTES: Final = 64 << 10  # what a request may take up before it has come
ANSWER_SECONDS_MAX: Final = 90.0  # the longest wait that a reader may ask for, and what looking a manifest up takes


class Streams:
    """The open streams of a daemon."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._threads = ThreadPoolExecutor(node.budgets.held_max[Resource.STREAMS], thread_name_prefix="quiver-stream")
        self._sockets: set[socket.socket] = set()
        self._closed = False

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Take a connection over for as long as its reader wants it."""
        transport = request.transport
        if not _is_upgrade(request):
            raise BadRequest(f"upgrade an HTTP/1.1 connection to {PROTOCOL} and send no body, or POST /v1/read")
        client, budgets = client_of(request), self._node.budgets
        if self._closed or transport is None or not budgets.hold(client, Resource.STREAMS):
            raise OverCapacity("as many streams are open here as this address may have; POST /v1/read", 60.0)
        try:
            return await self._switch(request, transport, client)
        finally:
            budgets.release(client, Resource.STREAMS)

    async def _switch(self, request: web.Request, transport: asyncio.Transport, client: str) -> web.StreamResponse:
        """Answer 101 and serve the stream to its end. Raises ``OSError`` if the reader is gone before that."""
        sock = _own_socket(transport)
        try:
            transport.set_write_buffer_limits(0)
            transport.pause_reading()  # from here on the thread reads
            response = web.StreamResponse(status=101, headers={"Connection": "Upgrade", "Upgrade": PROTOCOL})
            async with asyncio.timeout(BODY_SECONDS_MAX):
                writer = await response.prepare(request)
                assert writer is not None
                await writer.drain()
        except BaseException:
            sock.close()
            raise
        unhurried(request)
        self._sockets.add(sock)
        loop = asyncio.get_running_loop()
        try:
            await asyncio.shield(loop.run_in_executor(self._threads, self._run, sock, loop, client))
        finally:
            self._end(sock)
            transport.abort()
        return response

    def close(self) -> None:
        """End all streams. What is being sent is cut off."""
        self._closed = True
        for sock in list(self._sockets):
            self._end(sock)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _end(self, sock: socket.socket) -> None:
        """Have the thread find its socket at an end; it closes it."""
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    # -- in the stream's thread ---------------------------------------------------------------------------------------

    def _run(self, sock: socket.socket, loop: asyncio.AbstractEventLoop, client: str) -> None:
        try:
            while self._one(sock, loop, client):
                pass
        except (OSError, CancelledError) as error:
            log.debug("a stream ended: %s", error)
        finally:
            self._sockets.discard(sock)
            sock.close()

    def _one(self, sock: socket.socket, loop: asyncio.AbstractEventLoop, client: str) -> bool:
        """Serve one read; return whether there may be another."""
        head = _receive(sock, SIZE.size, IDLE_SECONDS)
        if head is None:
            return False
        size = SIZE.unpack(head)[0]
        if size > READ_REQUEST_BYTES_MAX:
            sock.sendall(refusal_frame(BadRequest(f"a request of {size} bytes; {READ_REQUEST_BYTES_MAX} are the most")))
            return False
        budgets = self._node.budgets
        if not budgets.hold(client, Resource.BODY_BYTES, size):
            sock.sendall(refusal_frame(budgets.refusal(Resource.BODY_BYTES)))
            return False  # its body is not read: what would come next is not a request
        try:
            return self._read(sock, loop, size, client)
        finally:
            budgets.release(client, Resource.BODY_BYTES, size)

    def _read(self, sock: socket.socket, loop: asyncio.AbstractEventLoop, size: int, client: str) -> bool:
        """Take the body of a request and answer it; return whether there may be another."""
        body = _receive(sock, size, BODY_SECONDS_MAX)
        if body is None:
            return False
        try:
            with Turn(self._node.reading, self._node.counters, client) as turn:
                statuses, payload = self._answer(loop, unpacked(self._node, body, client), turn)
                payload.head = ranges_frame(statuses, payload.size_bytes)
                return self._send(sock, loop, payload)
        except QuiverError as error:
            sock.sendall(refusal_frame(error))
            return not isinstance(error, BadRequest)

    def _answer(self, loop: asyncio.AbstractEventLoop, asked: ReadRequest, turn: Turn) -> Answer:
        answer = at_hand(self._node, asked, turn.client)
        if answer is None:
            asking = asyncio.run_coroutine_threadsafe(gather(self._node, asked, turn), loop)
            try:
                answer = asking.result(ANSWER_SECONDS_MAX)
            except TimeoutError:
                asking.cancel()
                raise Unavailable(self._node.url, "is not done with a request; ask again") from None
        return answer

    def _send(self, sock: socket.socket, loop: asyncio.AbstractEventLoop, payload: Payload) -> bool:
        """Send an answer; return whether it went out whole. What fails here can only cut it off: see ``respond``."""
        taking = Taking(self._node, payload)
        try:
            while not payload.done:
                count, slow = payload.push(sock, [])
                seconds = taking.took(count)
                if slow and not _ready(sock, select.POLLOUT, seconds):
                    raise TimeoutError("the reader does not take it")
        except (OSError, QuiverError) as error:
            if cut_off(error):
                loop.call_soon_threadsafe(self._node.suspect, payload.shards)
            return False
        return True


def _own_socket(transport: asyncio.Transport) -> socket.socket:
    """Return a socket of our own on a connection. Raises ``OverCapacity`` without a descriptor for it."""
    try:
        fd = os.dup(transport.get_extra_info("socket").fileno())
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise OverCapacity("no descriptor is left for a stream; POST /v1/read", 60.0) from error
        raise ConnectionResetError("the reader is gone") from error
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)
    return sock


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


def _receive(sock: socket.socket, size: int, seconds: float) -> bytearray | None:
    """Return so many bytes; ``None`` if the reader is gone, or does not send them in time.

    Room is made for what comes and not for what was announced: four bytes of a reader's would cost megabytes here.
    """
    data, deadline = bytearray(), time.monotonic() + seconds
    while len(data) < size:
        try:
            piece = sock.recv(min(size - len(data), PIECE_BYTES))
        except BlockingIOError:
            if not _ready(sock, select.POLLIN, deadline - time.monotonic()):
                return None
            continue
        if not piece:
            return None
        data += piece
    return data


def _ready(sock: socket.socket, event: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(sock, event)
    return seconds > 0 and bool(poller.poll(seconds * 1000))
