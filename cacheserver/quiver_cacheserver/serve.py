"""The daemon's life: built, bound to a port, in the ring, serving; and when told to end, drained and removed."""

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from aiohttp.http_exceptions import HttpProcessingError

from quiver import __version__
from quiver.errors import Corrupt, Misconfigured, QuiverError
from quiver.ring import Member, static_id
from quiver.sizes import format_size
from quiver.store import Kind, Store
from quiver.transport.tls import CHECK_SECONDS, NODE_URI, Credentials
from quiver_cacheserver.access.control import Access
from quiver_cacheserver.access.keys import PublicKeys
from quiver_cacheserver.access.quotas import Quotas
from quiver_cacheserver.access.tokens import Tokens
from quiver_cacheserver.budget import Resource
from quiver_cacheserver.config import Config, check
from quiver_cacheserver.draining.notice import drain_on_notice
from quiver_cacheserver.memory import release_fill_memory
from quiver_cacheserver.node import Node
from quiver_cacheserver.rack.addresses import is_loopback
from quiver_cacheserver.rack.etcd_registry import EtcdRegistry
from quiver_cacheserver.rack.registry import Registry, StaticRegistry
from quiver_cacheserver.serving.listening import Listening
from quiver_cacheserver.serving.unix_socket import Handoff, bound

log = logging.getLogger(__name__)

ENDED_BY: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # each drains; HUP: the terminal was closed
BACKLOG: Final = 4096  # all readers of a rack may connect at once
# Of each connection; the kernel takes twice that. Enough for 25 Gbit/s at the 100 µs of a rack, and little enough that
# what is sent to 64 readers at once stays in the CPU's cache: left to grow to 4 MiB each, it does not.
SEND_BUFFER_BYTES: Final = 256 << 10
OTHER_THREADS: Final = 4  # for what has no threads of its own; asyncio would take 32 on a large machine
ORIGINS_SECONDS: Final = 2.0  # how long a start waits to learn which origins the daemon can read
SUPERVISED_SECONDS: Final = 5.0  # before background work that failed is restarted
QUIET_SECONDS: Final = 1.0  # without a read: all readers have left a draining daemon
SCRUB_BYTES_PER_SECOND: Final = 16 << 20  # 1.4 TB a day: the whole of an SSD in days, without anyone noticing
SCRUB_IDLE_SECONDS: Final = 60.0


def build(config: Config, url: str, tls: Credentials | None = None) -> Node:
    """Compose the daemon. This function reads like the architecture: the disk, the ring, the node that joins them."""
    keys = PublicKeys(Path(config.token_keys).expanduser()) if config.token_keys else None
    certified = tls.identity.node if tls is not None else ""
    name = config.node_id or certified or static_id(url)  # not the host's name: two daemons may share a host
    # With tokens a user of this machine must not read other tenants' shards past the daemon.
    data_dir, private = Path(config.data_dir).expanduser(), keys is not None
    store = Store.open(data_dir, config.capacity_bytes, shared=False, url=url, private=private)
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
    access = Access(Tokens(keys, config.rack) if keys is not None else None)
    node = Node(__version__, store, registry, config.origin, access=access, tls=tls)
    node.allocator.settings = config.allocation
    if keys is not None:
        node.budgets.weight_of = Quotas.parse(config.quota).weight_of
        if tls is None and (config.etcd or config.peers):
            log.warning(
                "without certificates daemons cannot show that they are of one rack, so with --token-keys each reads"
                " the origin itself: give them --tls-cert, --tls-key and --tls-ca (`quiver tls init`)"
            )
        if tls is None and not is_loopback(config.address[0]):
            log.warning("--token-keys without --tls-cert: whoever listens on the network can read and use the tokens")
    return node


def load_tls(config: Config) -> Credentials | None:
    """Return the daemon's certificate and key, ``None`` without TLS.

    Raises ``Misconfigured`` if others would not accept them: an expired certificate, one of another authority, or one
    that does not name this node.
    """
    files = config.tls_files
    if files is None:
        return None
    tls = Credentials(files, serves=True)
    named = tls.identity.node
    if not named:
        raise Misconfigured(
            f"--tls-cert {files.cert}: it is not a node's certificate, which has one URI {NODE_URI}ID among its"
            " alternative names; make it with `quiver tls init DIR --node ID=HOST`"
        )
    if config.node_id and config.node_id != named:
        raise Misconfigured(
            f"--tls-cert {files.cert}: it is the certificate of node {named}, and --node-id is {config.node_id}"
        )
    return tls


def bind(config: Config) -> socket.socket:
    """Return the listening socket. Raises ``Misconfigured`` if the address cannot be used."""
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
    try:
        config.check_authenticates(listener.getsockname()[0])  # a name, even localhost, may be another address here
    except Misconfigured:
        listener.close()
        raise
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit it
    listener.setblocking(False)
    return listener


async def serve(config: Config, started: Callable[[Node], Awaitable[None]] | None = None) -> None:
    """Run the daemon until SIGTERM, SIGINT or SIGHUP. Raises ``Misconfigured`` if it cannot start."""
    check(config)
    tls = load_tls(config)
    _allow_open_files()
    stop = _Stop()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(OTHER_THREADS, thread_name_prefix="quiver-other"))
    for number in ENDED_BY:
        if signal.getsignal(number) is not signal.SIG_IGN or number is not signal.SIGHUP:  # as nohup has it
            loop.add_signal_handler(number, stop.signalled, number)
    with contextlib.closing(bind(config)) as listener, bound(config.socket) as readers:
        port = listener.getsockname()[1]
        url = config.advertised_url(port)
        if tls is not None:
            tls.check_host(urlsplit(url).hostname or "")
        node = build(config, url, tls)
        try:
            async with Handoff(node, readers) if readers is not None else contextlib.nullcontext():
                await _serve(config, node, listener, stop, started)
        finally:
            await loop.run_in_executor(None, node.close)


class _Stop:
    """What the process was told: to drain and end, and then perhaps to end at once."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()

    def signalled(self, number: signal.Signals) -> None:
        """The first signal begins the drain, and a second one ends it. A closed terminal may send SIGHUP as well."""
        if not self.drain.is_set():
            self.drain.set()
        elif number is not signal.SIGHUP:
            log.info("told again to end: the drain ends")
            self.now.set()


def _allow_open_files() -> None:
    """Take as many open files as the system allows: readers and their shards need more than the usual 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve(
    config: Config,
    node: Node,
    listener: socket.socket,
    stop: _Stop,
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
            running = [tasks.create_task(work) for work in _background(config, node)]
            await stop.drain.wait()
            for task in running:
                task.cancel()
        try:
            await _unless(stop.now, _drain(config, node))
        finally:
            await node.drain.close()


def _background(config: Config, node: Node) -> list[Coroutine[Any, Any, None]]:
    work = [_scrub, _watch_tls, lambda node: node.origins.watch(), lambda node: node.disk.watch(), release_fill_memory]
    work += [lambda node: node.access.follow_keys(), lambda node: node.allocator.run()]
    if config.eviction_notice:
        work.append(lambda node: drain_on_notice(config.eviction_notice, node.drain, config.drain_seconds))
    return [node.follow_needs(), *(_supervised(each, node) for each in work)]


async def _watch_tls(node: Node) -> None:
    """Load certificates again when their files change."""
    loop = asyncio.get_running_loop()
    while node.tls is not None:
        await asyncio.sleep(CHECK_SECONDS)
        await loop.run_in_executor(None, node.tls.refresh)


async def _supervised(work: Callable[[Node], Awaitable[None]], node: Node) -> None:
    """Run background work until it is cancelled or done. Whatever fails in it, the daemon serves what it holds."""
    while True:
        try:
            await work(node)
            return
        except Exception:  # the supervisor: a bug costs a round, never the daemon
            log.exception("background work failed and is restarted")
            await asyncio.sleep(SUPERVISED_SECONDS)


def _no_tracebacks_for_strangers(record: logging.LogRecord) -> bool:
    """Drop what aiohttp logs of requests that are not HTTP, and of clients that left: they could fill a disk."""
    return not (record.exc_info and isinstance(record.exc_info[1], (HttpProcessingError, ConnectionError)))


async def _drain(config: Config, node: Node) -> None:
    """Leave the ring, hand over, and serve on until there are no readers; all within ``--drain-seconds``."""
    deadline = time.monotonic() + config.drain_seconds
    await node.drain.begin(config.drain_seconds, "told to end", ends=True)
    quiet_since, served = time.monotonic(), _served(node)
    while time.monotonic() < deadline or not node.drain.is_announced:
        used = node.budgets.used
        under_way = used[Resource.WAITING] + used[Resource.UPLOADS] + used[Resource.FILES]  # which are no reads
        busy = node.counters.reads_in_flight or under_way or node.drain.is_handing_over or _served(node) != served
        if busy or not node.drain.is_announced:
            quiet_since, served = time.monotonic(), _served(node)
        elif time.monotonic() - quiet_since >= min(QUIET_SECONDS, config.drain_seconds):
            return
        await asyncio.sleep(0.05)


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Do some work, and give it up once the event is set."""
    async with asyncio.TaskGroup() as tasks:
        working, waiting = tasks.create_task(work), tasks.create_task(event.wait())
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        waiting.cancel()


def _served(node: Node) -> tuple[int, int]:
    return node.counters.served_bytes, node.counters.handed_files


async def _scrub(node: Node) -> None:
    """Verify what is on disk, slowly and without end: rot is found before a reader meets it."""
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
                continue  # evicted, or not readable now: the next round tries again
        await asyncio.sleep(SCRUB_IDLE_SECONDS)
