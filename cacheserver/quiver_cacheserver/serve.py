"""The daemon's life: built, bound to a port, in the ring, serving; and once told to end, drained and off the ring."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import shutil
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from aiohttp.http_exceptions import HttpProcessingError

from quiver import __version__
from quiver.errors import Corrupt, Misconfigured, QuiverError
from quiver.ring import Member
from quiver.sizes import format_size
from quiver.store import Kind, Store
from quiver_cacheserver.config import Config, check
from quiver_cacheserver.handoff import Handoff, bound
from quiver_cacheserver.listening import Listening
from quiver_cacheserver.memory import let_go_of_row_groups
from quiver_cacheserver.node import Node
from quiver_cacheserver.registry import EtcdRegistry, Registry, StaticRegistry, static_id

log = logging.getLogger(__name__)

ENDED_BY: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # each drains; HUP: the terminal is gone
BACKLOG: Final = 1024
ORIGINS_SECONDS: Final = 2.0  # a daemon that starts waits so long to know which of its origins it can read
SUPERVISED_SECONDS: Final = 5.0  # before background work that failed is begun again
QUIET_SECONDS: Final = 1.0  # a draining daemon that nobody has read from for so long has been left by all
SCRUB_BYTES_PER_SECOND: Final = 16 << 20  # 1.4 TB a day: the whole of an SSD in days, without anyone noticing
SCRUB_IDLE_SECONDS: Final = 60.0


def build(config: Config, url: str) -> Node:
    """Compose the daemon. This function reads like the architecture: the disk, the ring, the node that joins them."""
    name = config.node_id or static_id(url)  # a host's name would not do: two daemons may share it
    store = Store.open(Path(config.data_dir).expanduser(), config.capacity_bytes, shared=False, url=url)
    store.trim()
    disk_bytes = shutil.disk_usage(store.root).total
    if disk_bytes < config.capacity_bytes:
        log.warning("the disk of %s has %s in all, less than --capacity", store.root, format_size(disk_bytes))
    member = Member(name, url, weight=float(config.capacity_bytes), socket=config.socket)
    registry: Registry
    if config.etcd:
        registry = EtcdRegistry(config.etcd, config.rack, member, replicas=config.replicas)
    else:
        registry = StaticRegistry(config.rack, member, config.peers, replicas=config.replicas)
    return Node(registry.own.id, url, __version__, store, registry, config.origin)


def bind(config: Config) -> socket.socket:
    """Return the listening socket. Raises ``Misconfigured`` if the address cannot be had."""
    host, port = config.address
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        why = {
            errno.EADDRINUSE: "another process listens there, perhaps another daemon; stop it, or choose another port",
            errno.EADDRNOTAVAIL: "that is no address of this machine; write 0.0.0.0:PORT to listen on all that it has",
            errno.EACCES: "this user may not listen there; ports below 1024 are for root",
        }.get(getattr(error, "errno", None) or 0)
        raise Misconfigured(f"--listen {config.listen}: {why or getattr(error, 'strerror', None) or error}") from error
    listener.setblocking(False)
    return listener


async def serve(config: Config, started: Callable[[Node], Awaitable[None]] | None = None) -> None:
    """Run the daemon until SIGTERM, SIGINT or SIGHUP. Raises ``Misconfigured`` if it cannot start."""
    check(config)
    _allow_open_files()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in ENDED_BY:
        if signal.getsignal(number) is not signal.SIG_IGN or number is not signal.SIGHUP:  # as nohup has it
            loop.add_signal_handler(number, stop.set)
    with contextlib.closing(bind(config)) as listener, bound(config.socket) as readers:
        port = listener.getsockname()[1]
        node = build(config, config.advertised_url(port))
        try:
            async with Handoff(node, readers) if readers is not None else contextlib.nullcontext():
                await _serve(config, node, listener, stop, started)
        finally:
            await loop.run_in_executor(None, node.close)


def _allow_open_files() -> None:
    """Take as many open files as the system allows: readers and their shards need more than the usual 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve(
    config: Config,
    node: Node,
    listener: socket.socket,
    stop: asyncio.Event,
    started: Callable[[Node], Awaitable[None]] | None,
) -> None:
    logging.getLogger("aiohttp.server").addFilter(_no_tracebacks_for_strangers)
    async with Listening(node, listener), node.registry:
        await node.registry.wait_until_registered()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(node.origins.look(), ORIGINS_SECONDS)
        log.info("%s serves rack %s at %s", node.name, node.registry.ring.rack, node.url)
        if started is not None:
            await started(node)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(work) for work in _background(node)]
            await stop.wait()
            for task in running:
                task.cancel()
        await _drain(config, node)


def _background(node: Node) -> list[Coroutine[Any, Any, None]]:
    work = [_scrub, lambda node: node.origins.watch(), lambda node: node.disk.watch(), let_go_of_row_groups]
    return [node.follow_needs(), *(_supervised(each, node) for each in work)]


async def _supervised(work: Callable[[Node], Awaitable[None]], node: Node) -> None:
    """Do background work until it is cancelled or done. Whatever is wrong with it, the daemon serves what it holds."""
    while True:
        try:
            await work(node)
            return
        except Exception:  # the supervisor: a bug costs a round, never the daemon
            log.exception("background work failed and is begun again")
            await asyncio.sleep(SUPERVISED_SECONDS)


def _no_tracebacks_for_strangers(record: logging.LogRecord) -> bool:
    """Drop what aiohttp logs of requests that are not HTTP: they were answered, and anybody could fill a disk so."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


async def _drain(config: Config, node: Node) -> None:
    """Leave the ring, go on serving those who still ask, and end when they are gone or patience is."""
    node.state = "draining"
    log.info("%s drains", node.name)
    await node.registry.drain()
    deadline = time.monotonic() + config.drain_seconds
    quiet_since, served = time.monotonic(), _served(node)
    while time.monotonic() < deadline:
        busy = node.counters.reads_in_flight or _served(node) != served
        if busy:
            quiet_since, served = time.monotonic(), _served(node)
        elif time.monotonic() - quiet_since >= min(QUIET_SECONDS, config.drain_seconds):
            return
        await asyncio.sleep(0.05)


def _served(node: Node) -> tuple[int, int]:
    return node.counters.served_bytes, node.counters.handed_files


async def _scrub(node: Node) -> None:
    """Verify what is on disk, slowly and for ever: rot is found before a reader meets it."""
    loop = asyncio.get_running_loop()
    while True:
        for held in await loop.run_in_executor(node.disk_threads, node.store.inventory.held, Kind.SHARD):
            await asyncio.sleep(held.size_bytes / SCRUB_BYTES_PER_SECOND)
            try:
                await loop.run_in_executor(node.disk_threads, node.store.check, held.digest)
            except Corrupt as error:
                node.counters.count("corruptions", "disk")
                log.warning("scrubbing found and quarantined: %s", error)
            except QuiverError:
                continue  # gone, or not readable now: it comes round again
        await asyncio.sleep(SCRUB_IDLE_SECONDS)
