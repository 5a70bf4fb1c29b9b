"""The edge to etcd: aetcd's calls with deadlines, its exceptions as Quiver's, its types as the membership's.

Nothing outside this module sees aetcd or gRPC. What was seen of aetcd 1.0, and shapes this file (docs/adr has more):

* A connection is cheap and lazy; a lost one is thrown away whole. aetcd's watcher does not come back by itself. Read in
  its source, not seen: a watch stream that etcd ends in good order, or cancels, is reported to nobody.
* Without a timeout a call to a frozen etcd waits for ever, so every call has one. A watch has none: it stays open and
  says nothing while etcd is frozen. Periodic lists find that out.
* A lease that is gone is not an error in a keep-alive (TTL 0), but is ``NOT_FOUND`` in a put.
* ``get_prefix`` has no limit, and gRPC refuses answers over 4 MiB: a few fat records of anybody's would blind the rack.
  So the folder is read page by page through aetcd's own stub, with smaller pages where they are fat.
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
from quiver_cacheserver.rack.addresses import Endpoint

PAGE_KEYS_MAX: Final = 256
"""Records of 4 KiB, the largest that are valid, fill a quarter of what gRPC accepts."""
_OPTIONS: Final = {
    "grpc.use_local_subchannel_pool": 1,  # a new connection tries at once: no back-off left over from the lost one
    "grpc.enable_http_proxy": 0,  # etcd is inside the cluster; http_proxy is for outside
}


class Etcd:
    """One connection to etcd. Every call raises ``Unavailable`` where etcd does not answer as it should, in time."""

    def __init__(self, endpoint: Endpoint, timeout_seconds: float) -> None:
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
                await self._client.connect()  # asks nothing of etcd unless there is a password
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
        """Map what aetcd and gRPC raise: a ``ClientError`` mostly, a raw gRPC error or a time-out now and then."""
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
        """Read the folder as of one revision, ``KEYS_MAX`` keys at most."""
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
        """Set a watch up and return its changes, which end in ``Unavailable``."""
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
        """Renew the lease; False if it is gone."""
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
    """What a watch brought and was not learnt yet: the last change of each key, so its size is bounded."""

    def __init__(self) -> None:
        self._changes: dict[str, Entry | Gone] = {}
        self._lost: Unavailable | None = None
        self._woken = asyncio.Event()

    def reset(self) -> None:
        self._changes, self._lost = {}, None

    def wake(self) -> None:
        self._woken.set()

    async def fill(self, changes: AsyncIterator[Entry | Gone]) -> None:
        """Take changes in until the watch ends."""
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
        """Return what came, waiting for it if there is nothing; None if nothing came. Raises when the watch ended."""
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
    return raw.decode("utf-8", "backslashreplace")  # two keys that differ stay two; no member's name has a backslash


def _end(prefix: str) -> bytes:
    """The first key after the folder. The prefix ends in a slash, so its last byte can be raised by one."""
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
