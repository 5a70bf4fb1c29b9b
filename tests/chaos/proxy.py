"""A toxic TCP proxy: it stands before a server, and injects faults into what passes. One thread runs all proxies.

Toxics are switched on and off at run time. What each one did is counted (``fired``), because a test of a fault that did
not happen proves nothing. Chance is drawn from the seed, the proxy's name and the number of the connection, so a seed
replays a run as far as the order of connections is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import uvloop

from tests.chaos.framing import Answers, Part, Piece, Requests
from tests.chaos.toxics import DOWN, UP, Toxic

READ_BYTES = 64 << 10
CONNECT_SECONDS_MAX = 5.0


class Network:
    """The thread and event loop of all proxies of a test. Leaving it closes every connection."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.loop = uvloop.new_event_loop()
        self.proxies: list[Proxy] = []
        self._thread = threading.Thread(target=self.loop.run_forever, name="chaos-network")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for proxy in self.proxies:
            proxy.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

    def proxy(self, name: str, target: str, port: int = 0) -> Proxy:
        """Return a listening proxy before ``target`` (``http://host:port``), which need not listen yet."""
        made = Proxy(self, name, target, port)
        self.proxies.append(made)
        made.listen()
        return made

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def fired(self) -> Counter[str]:
        """Return how often each kind of toxic fired, over all proxies."""
        return sum((proxy.fired for proxy in self.proxies), Counter())


class Active:
    """A toxic that is switched on."""

    def __init__(self, toxic: Toxic) -> None:
        self.toxic = toxic
        self.over = asyncio.Event()


class Proxy:
    """One listening address and the server behind it. Its methods are called by tests, from any thread."""

    def __init__(self, network: Network, name: str, target: str, port: int) -> None:
        self.name = name
        self.port = port
        self.fired: Counter[str] = Counter()
        self.connections = 0
        self.active: tuple[Active, ...] = ()
        self.retarget(target)
        self._network = network
        self._listener: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def retarget(self, target: str) -> None:
        """Send new connections to another server."""
        parts = urlsplit(target)
        assert parts.hostname, target
        assert parts.port, target
        self.target = parts.hostname, parts.port

    # -- toxics -------------------------------------------------------------------------------------------------------

    def add(self, *toxics: Toxic) -> None:
        self.active = (*self.active, *(Active(toxic) for toxic in toxics))

    def remove(self, *toxics: Toxic) -> None:
        gone = [active for active in self.active if active.toxic in toxics]
        self.active = tuple(active for active in self.active if active.toxic not in toxics)
        for active in gone:
            self._network.loop.call_soon_threadsafe(active.over.set)

    def clear(self) -> None:
        self.remove(*(active.toxic for active in self.active))

    @contextlib.contextmanager
    def toxic(self, *toxics: Toxic) -> Iterator[None]:
        self.add(*toxics)
        try:
            yield
        finally:
            self.remove(*toxics)

    # -- connections --------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Accept connections, at the same port as before."""
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", self.port), backlog=1024)
            self.port = self._listener.getsockname()[1]
            self._network.run(self._listen(self._listener))

    def refuse(self) -> None:
        """Refuse new connections, and reset those that are open: what a client sees of a process that was killed."""
        if self._listener is not None:
            self._network.run(self._stop_listening())
            self._listener = None
        self.sever()

    def sever(self) -> None:
        """Reset all open connections."""
        self._network.run(self._sever())

    def close(self) -> None:
        self.clear()
        self.refuse()

    async def _listen(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._accepted, sock=listener, limit=READ_BYTES)

    async def _stop_listening(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _sever(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            await self._serve(_Side(reader, writer), self.connections)
        except asyncio.CancelledError:
            _abort(writer)
        finally:
            self._tasks.discard(task)

    async def _serve(self, client: _Side, number: int) -> None:
        try:
            async with asyncio.timeout(CONNECT_SECONDS_MAX):
                server = _Side(*await asyncio.open_connection(*self.target, limit=READ_BYTES))
        except OSError:  # TimeoutError is one
            _abort(client.writer)
            return
        rng = random.Random(f"{self._network.seed} {self.name} {number}")
        link = _Connection(self, client, server, rng)
        try:
            await link.run()
        finally:
            _abort(client.writer) if link.is_reset else client.writer.close()
            _abort(server.writer) if link.is_reset else server.writer.close()


class _Side:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close with RST, not FIN."""
    with contextlib.suppress(OSError):
        sock = writer.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class _Ended(Exception):
    pass


class _Connection:
    """A client's connection and that to the server, until either side or a toxic ends them."""

    def __init__(self, proxy: Proxy, client: _Side, server: _Side, rng: random.Random) -> None:
        self.proxy = proxy
        self.is_reset = False
        self.spoke = ""  # the direction that spoke last
        self._rng = rng
        requests = Requests()
        self._answers = Answers(requests)
        self._requests = requests
        self._ways = (
            _Way(self, UP, client.reader, server.writer, rng),
            _Way(self, DOWN, server.reader, client.writer, rng),
        )

    async def run(self) -> None:
        """Pass bytes on until one direction ends; then the other one is not waited for, as HTTP does not half-close."""
        tasks = [asyncio.ensure_future(way.run()) for way in self._ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def pieces(self, direction: str, data: bytes) -> list[Piece]:
        if direction == DOWN:
            return list(self._answers.pieces(data))
        self._requests.feed(data)
        return [Piece(Part.RAW, data)]


class _Way:
    """One direction of a connection: the ``Link`` that toxics see."""

    def __init__(
        self,
        connection: _Connection,
        direction: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        rng: random.Random,
    ) -> None:
        self.rng = rng
        self.passed_bytes = 0
        self.begins = False
        self._connection, self._direction = connection, direction
        self._reader, self._writer = reader, writer
        self._applied: Active | None = None
        self._ends = False

    async def run(self) -> None:
        with contextlib.suppress(OSError, _Ended):
            while data := await self._reader.read(READ_BYTES):
                self.begins = self._connection.spoke != self._direction
                self._connection.spoke = self._direction
                for piece in self._connection.pieces(self._direction, data):
                    await self._pass(piece)
                    self.passed_bytes += len(piece.data)
                    self.begins = False
                await self._writer.drain()

    async def _pass(self, piece: Piece) -> None:
        pieces = [piece]
        for active in self._connection.proxy.active:
            if active.toxic.direction == self._direction:
                self._applied = active
                pieces = [out for each in pieces for out in await active.toxic.apply(self, each)]
        for each in pieces:
            if each.data:
                self._writer.write(each.data)
            if len(pieces) > 1:
                await asyncio.sleep(0)  # a segment of its own
        if self._ends:
            await self._writer.drain()
            raise _Ended

    def fire(self) -> None:
        assert self._applied is not None
        self._connection.proxy.fired[self._applied.toxic.name] += 1

    async def hang(self) -> None:
        assert self._applied is not None
        await self._applied.over.wait()

    def reset(self) -> None:
        self._connection.is_reset = True
        raise _Ended

    def end(self) -> None:
        self._ends = True
