"""Connections of the daemon: accepted, bounded per address and in all, and closed at their deadlines.

Invariant: every connection has a deadline. A new one sends the whole head of a request within ``HEAD_SECONDS``, as does
an old one from the first byte of its next request on; between requests it may be idle for ``IDLE_SECONDS``; an answer
is taken within ``ANSWER_SECONDS``, except on routes that keep the time themselves (``unhurried``). So unused sockets
do not take the descriptors that honest readers need. Where an address has as many connections as it may, its longest
idle ones are closed for its next: their owners connect again. Streams leave this module with their upgrade: the poller
keeps their deadlines.

aiohttp closes idle connections, but not those that send half a head, or do not take their answer. Its site leaves
accepting to libuv, which stops listening permanently if no descriptor is left at the wrong moment. So this module
accepts connections itself, and pauses then.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import ssl
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from aiohttp import web

from quiver.transport.tls import NOBODY, Credentials, Identity, explained, label
from quiver_cacheserver.access.caller import Caller
from quiver_cacheserver.access.tokens import Reason
from quiver_cacheserver.budget import Budgets, Cost, Resource, address_of
from quiver_cacheserver.counters import Counters
from quiver_cacheserver.node import Node
from quiver_cacheserver.serving.app import POLLER, make_app
from quiver_cacheserver.serving.heads import HEADERS_MAX, LINE_BYTES_MAX, Heads
from quiver_cacheserver.serving.poller import READABLE
from quiver_cacheserver.serving.requests import ANSWER_SECONDS, Timed
from quiver_cacheserver.serving.tls import Handshake, TlsTransport

log = logging.getLogger(__name__)

HEAD_SECONDS: Final = 10.0  # for a head of a hundred bytes, over a rack's network
IDLE_SECONDS: Final = 120.0  # as of a stream; a reader that pauses for longer connects again
SWEEP_SECONDS: Final = 1.0
ACCEPTED_MAX: Final = 64  # in one go; then the connections that are open have their turn
PAUSE_SECONDS: Final = 0.1  # without descriptors; idle connections are closed meanwhile
CLOSED_SHARE: Final = 16  # of an address's connections are closed at a time, to amortize the search for them
SHUTDOWN_SECONDS: Final = 1.0  # after the drain, which was the time to finish; aiohttp waits so long twice
MAPPINGS_MAX: Final = 65530  # Linux's default
NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ClientConnection(Timed):
    """One connection. Belongs to the event loop."""

    __slots__ = ("_arriving", "_heads", "_held", "_idle", "_listening")

    def __init__(self, listening: Listening, server: web.Server, address: str, identity: Identity = NOBODY) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=IDLE_SECONDS,
            access_log=None,  # type: ignore[arg-type]  # as AppRunner passes it on for none
            max_line_size=LINE_BYTES_MAX,
            max_field_size=LINE_BYTES_MAX,
            max_headers=HEADERS_MAX,
            auto_decompress=False,  # an upload is bytes with a name, never something to unpack
        )
        self.address = address
        self.identity = identity
        self._listening = listening
        self._heads = Heads(listening.budgets, address)
        self._held = True  # of the budget: ``Listening`` took it
        self._arriving = True
        self._idle = False
        self.deadline = self._loop.time() + HEAD_SECONDS

    @property
    def idle(self) -> bool:
        """Whether a request was answered on it, and none is under way."""
        return self._idle

    def connection_lost(self, exc: BaseException | None) -> None:
        self._give_back()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._idle:
            self._idle = False
            self.deadline = self._loop.time() + HEAD_SECONDS
        if self._heads.is_over:
            return
        before, was_in_head = self._request_count, self._heads.in_head
        super().data_received(data)
        begun = self._request_count - before
        if not self._heads.receive(len(data), begun, self._messages, was_in_head=was_in_head):
            self._listening.count_closed("head")
            self.end()

    def begin(self) -> None:
        self._idle = False
        self._arrived()
        self.deadline = self._loop.time() + ANSWER_SECONDS

    def log_access(self, *_: object) -> None:
        """An answer was sent: the one place where aiohttp says so."""
        self._arrived()  # malformed requests too, which were refused
        self._heads.answered()
        self._idle = True
        self.deadline = self._loop.time() + IDLE_SECONDS

    def end(self) -> None:
        """Close it, even during a request."""
        self._give_back()  # at once: the next connection may need what it held
        if self.transport is not None:
            self.transport.abort()

    def _arrived(self) -> None:
        if self._arriving:
            self._arriving = False
            self._listening.budgets.release(self.address, Resource.ARRIVING)

    def _give_back(self) -> None:
        self._arrived()
        self._heads.release()
        if self._held:
            self._held = False
            self._listening.lost(self)


class Listening:
    """Accepts connections, and serves a node on them, between ``async with``'s two ends."""

    def __init__(self, node: Node, listener: socket.socket) -> None:
        self.budgets: Budgets = node.budgets
        self._counters: Counters = node.counters
        self._access = node.access
        self._tls = node.tls
        self._listener = listener
        app = make_app(node)
        self._poller = app[POLLER]
        self._runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=SHUTDOWN_SECONDS)
        self._closing = False
        self._connections: dict[str, set[ClientConnection]] = {}  # by address
        self._group = asyncio.TaskGroup()
        self._resuming: asyncio.TimerHandle | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._spare = -1  # a spare descriptor, closed to accept and refuse a client when none is left
        # The rest is for shards.
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        shares = {Resource.CONNECTIONS: 2, Resource.ARRIVING: 4, Resource.STREAMS: 4, Resource.OPEN_FILES: 4}
        held_max = self.budgets.held_max
        for what, share in shares.items():
            held_max[what] = min(held_max[what], descriptors // share)
        held_max[Resource.OPEN_FILES] = min(held_max[Resource.OPEN_FILES], _mappings_max() // 2)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await self._group.__aenter__()
        self._sweeping = self._group.create_task(self._sweep(), name="connections")
        self._listener.setblocking(False)
        self._spare = _spare()
        self._resume()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._pause()
        self._closing = True
        self._poller.end_all(Handshake)
        assert self._sweeping is not None
        self._sweeping.cancel()
        for connection in [each for its in self._connections.values() for each in its]:
            connection.end()  # drained: who has not taken an answer by now does not take it
        try:
            await self._runner.cleanup()
            await self._group.__aexit__(None, None, None)
        finally:
            if self._spare >= 0:
                os.close(self._spare)

    # -- accepting ----------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        self._resuming = None
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _pause(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None

    def _accept(self) -> None:
        for _ in range(ACCEPTED_MAX):
            try:
                accepted, peer = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in NO_DESCRIPTOR:
                    self._run_short()
                    return
                continue  # a client that left before it was accepted
            address = address_of(peer)
            if not self._admit(address):
                accepted.close()
            elif self._tls is not None:
                self._shake_hands(self._tls, accepted, address)
            else:
                self._group.create_task(self._connect(accepted, address))

    def _admit(self, address: str) -> bool:
        """Reserve budget for a new connection; return whether the address may have one more."""
        held = self.budgets.hold
        if not held(address, Resource.CONNECTIONS, counted=False) and not (
            self._close_idle(address) and held(address, Resource.CONNECTIONS)
        ):
            return False
        now = asyncio.get_running_loop().time()
        if (self._tls is None or self.budgets.spend(address, Cost.HANDSHAKES, 1, now)) and held(
            address, Resource.ARRIVING
        ):
            return True
        self.budgets.release(address, Resource.CONNECTIONS)
        return False

    def _shake_hands(self, tls: Credentials, accepted: socket.socket, address: str) -> None:
        """Begin a handshake, which a worker of the poller goes on with."""
        accepted.setblocking(False)
        try:
            sock = tls.server().wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
        except OSError as error:  # the client has left
            log.debug("a connection was not made: %s", error)
            accepted.close()
            self._release(address)
            return
        handshake = Handshake(sock, address, time.monotonic() + HEAD_SECONDS, self._shaken)
        try:
            self._poller.add(handshake, READABLE)
        except OSError as error:
            log.debug("a connection was not made: %s", error)
            sock.close()
            self._release(address)

    def _shaken(self, handshake: Handshake) -> None:
        """A handshake ended: serve HTTP on the connection, or forget it."""
        address, failure = handshake.client, handshake.failure
        if handshake.late:
            self._counters.connections_closed["late"] += 1
        if failure is not None:
            self._counters.tls_refusals[label(failure)] += 1
            log.warning("a TLS connection from %s was refused: %s", address, explained(failure))
            if isinstance(failure, ssl.SSLCertVerificationError):
                self._access.audit.refused(Caller(address), "TLS handshake", Reason.CERTIFICATE)
        server = self._runner.server
        if not handshake.is_done or self._closing or server is None:
            handshake.sock.close()
            self._release(address)
            return
        connection = ClientConnection(self, server, address, handshake.identity)
        self._connections.setdefault(address, set()).add(connection)
        TlsTransport(handshake.sock, connection)

    def _release(self, address: str) -> None:
        self.budgets.release(address, Resource.ARRIVING)
        self.budgets.release(address, Resource.CONNECTIONS)

    async def _connect(self, accepted: socket.socket, address: str) -> None:
        server = self._runner.server
        assert server is not None
        accepted.setblocking(False)
        connection = ClientConnection(self, server, address)
        self._connections.setdefault(address, set()).add(connection)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, accepted)
        except OSError as error:
            log.debug("a connection was not made: %s", error)
            connection.end()
            accepted.close()
        except Exception:  # a supervisor: a bug costs this connection, and not the daemon
            log.exception("a connection was not made")
            connection.end()
            accepted.close()

    def _run_short(self) -> None:
        """No descriptor is left: close idle connections, refuse those that wait, and accept again in a moment."""
        self._counters.overloads += 1
        busiest = max(self._connections, key=lambda address: len(self._connections[address]), default="")
        if len(self._connections.get(busiest, ())) > CLOSED_SHARE:  # otherwise something else takes the descriptors
            self._close_idle(busiest)
        if self._spare >= 0:
            os.close(self._spare)
        with contextlib.suppress(OSError):
            for _ in range(ACCEPTED_MAX):  # all that wait, so that none waits through many pauses
                self._listener.accept()[0].close()
        self._spare = _spare()
        self._pause()
        self._resuming = asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._resume)

    # -- closing ------------------------------------------------------------------------------------------------------

    def _close_idle(self, address: str) -> int:
        """Close some of the address's connections that were idle for longest; return how many."""
        its = self._connections.get(address, ())
        idle = sorted((each for each in its if each.idle), key=lambda each: each.deadline)
        closed = idle[: len(its) // CLOSED_SHARE + 1]
        for connection in closed:
            connection.end()
        self._counters.connections_closed["room"] += len(closed)
        return len(closed)

    def lost(self, connection: ClientConnection) -> None:
        """Forget a connection that is closed, or about to be."""
        its = self._connections[connection.address]
        its.discard(connection)
        if not its:
            del self._connections[connection.address]
        self.budgets.release(connection.address, Resource.CONNECTIONS)

    def count_closed(self, why: str) -> None:
        self._counters.connections_closed[why] += 1

    async def _sweep(self) -> None:
        """Close connections that are past their deadlines, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(SWEEP_SECONDS, HEAD_SECONDS / 4, IDLE_SECONDS / 4))
            now = loop.time()
            late = [each for its in self._connections.values() for each in its if each.deadline < now]
            for connection in late:
                self.count_closed("idle" if connection.idle else "late")
                connection.end()


def _mappings_max() -> int:
    """Return how many mappings the kernel allows a process: of each file that is sent there is one."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return MAPPINGS_MAX


def _spare() -> int:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
