"""The adapter to etcd: aetcd's calls with deadlines, its exceptions as Quiver's, its types as the membership's.

Nothing outside this module uses aetcd or gRPC. Observations of aetcd 1.0 that shape this file (docs/adr has more):

* A connection is cheap and lazy; a lost one is discarded whole. aetcd's watcher does not reconnect. Read in its source,
  not observed: if etcd ends or cancels a watch stream in good order, nobody is notified.
* Without a timeout, a call to a frozen etcd never returns, so every call has one. A watch has none: it stays open and
  silent while etcd is frozen. Periodic lists detect that.
* An expired lease is no error in a keep-alive (TTL 0), but ``NOT_FOUND`` in a put.
* ``get_prefix`` has no limit, and gRPC rejects answers over 4 MiB: a few large records, which anybody can write, would
  hide the rack. So the folder is read page by page through aetcd's own stub, with smaller pages if records are large.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Final, Self

import aetcd
from aetcd import rpc

from quiver.errors import NotFound, Unavailable
from quiver.membership import KEYS_MAX, Changed, Entry, Gone, Listed
from quiver_cacheserver.rack.addresses import EtcdEndpoint

PAGE_KEYS_MAX: Final = 256
"""Records of 4 KiB, the largest that are valid, fill a quarter of what gRPC accepts."""
_OPTIONS: Final = {
    "grpc.use_local_subchannel_pool": 1,  # a new connection connects at once, without the backoff of the lost one
    "grpc.enable_http_proxy": 0,  # etcd is inside the cluster; http_proxy is for outside
}


class Etcd:
    """One connection to etcd. Every call raises ``Unavailable`` if etcd does not answer correctly and in time."""

    def __init__(self, endpoint: EtcdEndpoint, timeout_seconds: float) -> None:
        self._endpoint = endpoint
        self._timeout_seconds = timeout_seconds
        self._client = aetcd.Client(
            endpoint.host,
            endpoint.port,
            endpoint.username,
            endpoint.password,
            timeout=timeout_seconds,
            options=_OPTIONS,
        )

    async def __aenter__(self) -> Self:
        connected = False
        try:
            with self._mapped():
                await self._client.connect()  # sends nothing to etcd unless there is a password
            connected = True
        finally:
            if not connected:
                await self._client.close()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._client.close()

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        """Map what aetcd and gRPC raise: usually a ``ClientError``, sometimes a raw gRPC error or a timeout."""
        try:
            yield
        except aetcd.WatchTimeoutError as error:
            raise Unavailable(str(self._endpoint), "a watch was not set up in time") from error
        except aetcd.ClientError as error:
            if _code(error) is rpc.StatusCode.NOT_FOUND:
                raise NotFound(f"{self._endpoint}: {error}") from error
            raise Unavailable(str(self._endpoint), str(error) or type(error).__name__) from error
        except (rpc.AioRpcError, rpc.BaseError, TimeoutError) as error:
            raise Unavailable(str(self._endpoint), _details(error)) from error

    async def list(self, prefix: str) -> Listed:
        """Read the folder at one revision, at most ``KEYS_MAX`` keys."""
        entries: list[Entry] = []
        begin, end, revision, limit = prefix.encode(), _end(prefix), 0, PAGE_KEYS_MAX
        while True:
            request = rpc.RangeRequest(key=begin, range_end=end, limit=limit, revision=revision)
            try:
                with self._mapped():
                    page = await self._client.kvstub.Range(
                        request, timeout=self._timeout_seconds, metadata=self._client.metadata
                    )
            except Unavailable as error:
                if _code(error) is not rpc.StatusCode.RESOURCE_EXHAUSTED or limit == 1:
                    raise
                limit //= 2
                continue
            revision = revision or page.header.revision
            entries.extend(_entry(kv) for kv in page.kvs)
            if not page.more or len(entries) >= KEYS_MAX:
                return Listed(tuple(entries[:KEYS_MAX]), revision)
            begin, limit = page.kvs[-1].key + b"\0", min(limit * 2, PAGE_KEYS_MAX)

    async def watch(self, prefix: str, from_revision: int) -> AsyncIterator[Entry | Gone]:
        """Set up a watch and return its changes, which end in ``Unavailable``."""
        with self._mapped():
            watch = await self._client.watch_prefix(prefix.encode(), start_revision=from_revision)
        return self._changes(watch)

    async def _changes(self, watch: Any) -> AsyncIterator[Entry | Gone]:
        with self._mapped():
            async for event in watch:
                yield _entry(event.kv) if event.kind == "PUT" else Gone(_key(event.kv.key), event.kv.mod_revision)
        raise Unavailable(str(self._endpoint), "the watch ended")

    async def grant(self, ttl_seconds: float) -> int:
        """Return the id of a new lease."""
        with self._mapped():
            lease = await self._client.lease(-int(-ttl_seconds // 1))
        return int(lease.id)

    async def keep_alive(self, lease: int) -> bool:
        """Renew the lease; return False if it has expired."""
        with self._mapped():
            reply = await self._client.refresh_lease(lease)
        return reply is not None and reply.TTL > 0

    async def register(self, key: str, value: bytes, lease: int, over: int) -> Entry | None:
        """Write the key if its revision is still ``over`` (0: absent), else return None. NotFound: no such lease."""
        name, transactions = key.encode(), self._client.transactions
        with self._mapped():
            done, replies = await self._client.transaction(
                compare=[transactions.mod(name) == over],
                success=[transactions.put(name, value, lease=lease)],
                failure=[],
            )
        return Entry(key, value, replies[0].response_put.header.revision, lease) if done else None

    async def revoke(self, lease: int) -> None:
        """End the lease and all keys under it, now."""
        with self._mapped():
            await self._client.revoke_lease(lease)


class Inbox:
    """Changes that a watch delivered and nobody has taken: the last one of each key, so its size is bounded."""

    def __init__(self) -> None:
        self._changes: dict[str, Entry | Gone] = {}
        self._lost: Unavailable | None = None
        self._woken = asyncio.Event()

    def reset(self) -> None:
        self._changes, self._lost = {}, None

    def wake(self) -> None:
        self._woken.set()

    async def fill(self, changes: AsyncIterator[Entry | Gone]) -> None:
        """Collect changes until the watch ends."""
        try:
            async for change in changes:
                self._changes[change.key] = change
                if len(self._changes) > KEYS_MAX:
                    raise Unavailable("etcd", f"more than {KEYS_MAX} keys changed at once")
                self.wake()
        except Unavailable as error:
            self._lost = error
            self.wake()

    async def wait(self, timeout_seconds: float) -> Changed | None:
        """Return the changes, waiting for one if there is none yet; None if none came. Raises if the watch ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, timeout_seconds)):
                await self._woken.wait()
        self._woken.clear()
        if self._lost is not None:
            raise self._lost
        return self.take()

    def take(self) -> Changed | None:
        changes, self._changes = self._changes, {}
        return Changed(tuple(changes.values())) if changes else None


def _entry(kv: Any) -> Entry:
    return Entry(_key(kv.key), bytes(kv.value), kv.mod_revision, kv.lease)


def _key(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")  # distinct keys stay distinct; no member's id has a backslash


def _end(prefix: str) -> bytes:
    """Return the first key after the folder. The prefix ends in a slash, so its last byte can be incremented."""
    raw = prefix.encode()
    return raw[:-1] + bytes([raw[-1] + 1])


def _code(error: BaseException | None) -> Any:
    """Return gRPC's status code of the error, or of what it was raised from."""
    while error is not None and not isinstance(error, rpc.AioRpcError):
        error = error.__cause__
    return error.code() if error is not None else None


def _details(error: BaseException) -> str:
    if isinstance(error, rpc.AioRpcError):
        return str(error.details() or error.code().name)
    return "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
