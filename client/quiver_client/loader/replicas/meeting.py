"""How followers find their leader: torch.distributed's store has its address and two secrets; then they connect.

The store is used by the thread that begins a pass, for a ``set`` or ``get`` that returns at once. A blocking ``get``
would keep other users of the same store waiting, torch's own watchdog among them, and not every store can be cloned.

The leader listens at the address by which its host reaches the store, so at one that the other hosts know. Where that
says nothing (a ``FileStore``), it is the address of the default route. ``QUIVER_REPLICAS_HOST`` overrides both.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from quiver.errors import BadRequest
from quiver.malformed import MALFORMED
from quiver.prepared import prepare
from quiver_client.loader.group_store import group_store
from quiver_client.loader.replicas.messages import STRANGER_BYTES_MAX, Frames, Hello, Welcome, encode

HOST_VARIABLE: Final = "QUIVER_REPLICAS_HOST"
ELSEWHERE: Final = "192.0.2.1"  # reserved for documentation (RFC 5737): a route is looked up, and nothing is sent
LOOPBACK: Final = "127.0.0.1"
CONNECT_SECONDS: Final = 5.0  # for one attempt
RETRY_SECONDS: Final = (0.005, 0.25)  # between two looks at the store
INVITATION_BYTES_MAX: Final = 1024
KEEPALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 45_000}


class Invitation(msgspec.Struct, frozen=True):
    """Where the leader listens, what a follower shows it, and what it shows a follower."""

    host: str
    port: int
    followers_secret: bytes
    leaders_secret: bytes


def listen() -> tuple[socket.socket, Invitation]:
    """Return a listening socket and the invitation to it. Raises ``ValueError`` if the host cannot be listened at."""
    host = os.environ.get(HOST_VARIABLE, "") or _own_host()
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        listening = socket.create_server((address[0], 0), family=family, backlog=1024)
    except OSError as error:
        raise ValueError(f"{HOST_VARIABLE}: cannot listen at {host!r} ({error}); set it to an address of this host that"
                         " the other ranks of the group can reach") from error  # fmt: skip
    listening.setblocking(False)
    port = listening.getsockname()[1]
    return listening, Invitation(str(address[0]), port, secrets.token_bytes(16), secrets.token_bytes(16))


def publish(store: Any, key: str, invitation: Invitation) -> None:
    """Write an invitation to the store, in place of an earlier one."""
    store.set(key, msgspec.json.encode(invitation).decode())


def meet(store: Any, key: str, rank: int, check: Callable[[], None]) -> socket.socket:
    """Return a connection to the leader, which has checked that this is ``rank``.

    Tries until it succeeds; ``check`` is called before each attempt, and raises once there should be no more.
    """
    pause = RETRY_SECONDS[0]
    while True:
        check()
        connected = try_to_meet(store, key, rank)
        if connected is not None:
            return connected
        time.sleep(pause)
        pause = min(pause * 2, RETRY_SECONDS[1])


def try_to_meet(store: Any, key: str, rank: int) -> socket.socket | None:
    """Make one attempt; ``None`` if the leader is not there, or not any more."""
    return _attempt(_found(store, key), rank)


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel detect a host that is gone; one whose process is suspended still answers."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def default_store() -> Any:
    """Return torch.distributed's store. Raises ``ValueError`` if there is none."""
    store = group_store()
    if store is None:
        raise ValueError("mesh, replicate: there is no process group any more; iterate the loader while there is one")
    return store


def _found(store: Any, key: str) -> Invitation | None:
    if not store.check([key]):
        return None
    published = bytes(store.get(key))
    with contextlib.suppress(*MALFORMED):
        if len(published) <= INVITATION_BYTES_MAX:
            return msgspec.json.decode(published, type=Invitation)
    return None


def _attempt(invitation: Invitation | None, rank: int) -> socket.socket | None:
    """Connect and introduce each other; ``None`` if the leader is not there, as after a restart, or is another."""
    if invitation is None:
        return None
    with contextlib.ExitStack() as undo:
        try:
            connection = undo.enter_context(
                socket.create_connection((invitation.host, invitation.port), timeout=CONNECT_SECONDS)
            )
            keep_alive(connection)
            connection.sendall(encode(Hello(invitation.followers_secret, rank)))
            answer = _first(connection)
        except (OSError, BadRequest, OverflowError):
            return None
        if answer is None or not secrets.compare_digest(answer.secret, invitation.leaders_secret):
            return None
        undo.pop_all()
        connection.setblocking(False)
        return connection


def _first(connection: socket.socket) -> Welcome | None:
    """Return the leader's answer, and read nothing beyond it."""
    frames = Frames(STRANGER_BYTES_MAX)
    until = time.monotonic() + CONNECT_SECONDS
    while time.monotonic() < until:
        data = connection.recv(1)  # what follows is for the thread that reads from now on
        if not data:
            return None
        frames.add(data)
        message = frames.next()
        if message is not None:
            return message if isinstance(message, Welcome) else None
    return None


def _own_host() -> str:
    """Return the address by which this host reaches the store, else that of the default route, else the loopback."""
    master = _store_host() or os.environ.get("MASTER_ADDR", "")
    if master in ("localhost", LOOPBACK, "::1"):
        return LOOPBACK
    source = _source_towards(master) if master else ""
    # The store's own host may know its name as 127.0.1.1, which is no address for the others.
    if not source or source.startswith("127.") or source == "::1":
        source = _source_towards(ELSEWHERE)
    return source or LOOPBACK


def _store_host() -> str:
    with contextlib.suppress(ValueError):
        store = default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return str(getattr(store, "host", "") or "")
    return ""


def _source_towards(host: str) -> str:
    """Return the address from which packets to a host would come; empty if there is no route."""
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


prepare(Invitation)
