"""A daemon within the test's process, where a test can replace parts of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import uvloop

from quiver.digest import Digest
from quiver.domain import SINGLE, Domain
from quiver.ring import Member
from quiver.store import Kind, Store
from quiver.transport.tls import Credentials
from quiver_cacheserver.budget import Resource
from quiver_cacheserver.node import Node
from quiver_cacheserver.rack.registry import StaticRegistry
from quiver_cacheserver.serving.listening import Listening

CAPACITY_BYTES = 256 << 20


@contextlib.contextmanager
def in_process(
    where: Path,
    put: dict[Digest, bytes] | None = None,
    send_bytes: int = 0,
    held_max: Mapping[Resource, int] | None = None,
    made: Callable[[Node], object] = lambda _: None,
    *,
    domain: Domain = SINGLE,
    tls: Credentials | None = None,
    origins: Iterable[str] = (),
) -> Iterator[tuple[str, int]]:
    """Run a daemon under uvloop in a thread; yield its address. ``made`` is called with its node before it serves."""
    store = Store.open(where / "store", CAPACITY_BYTES, shared=False)
    for digest, data in (put or {}).items():
        with store.reserve(Kind.SHARD, digest, len(data), (), domain) as writing:
            writing.write(data)
            writing.commit()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    url = url_of(listener.getsockname(), "https" if tls is not None else "http")
    node = Node("0", store, StaticRegistry("r", Member("a", url)), origins, tls=tls)
    node.verification._unverified.clear()
    node.budgets.held_max.update(held_max or {})
    made(node)
    if send_bytes:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)  # accepted connections inherit it
    stop: list[Callable[[], object]] = []

    async def run() -> None:
        async with Listening(node, listener):
            over = asyncio.Event()
            loop = asyncio.get_running_loop()
            stop.append(lambda: loop.call_soon_threadsafe(over.set))
            await over.wait()

    thread = threading.Thread(target=lambda: uvloop.run(run()))
    thread.start()
    try:
        while not stop:
            thread.join(0.01)
            assert thread.is_alive()
        yield listener.getsockname()
    finally:
        for each in stop:
            each()
        thread.join()
        listener.close()
        node.close()


def url_of(address: tuple[str, int], scheme: str = "http") -> str:
    return f"{scheme}://{address[0]}:{address[1]}"
