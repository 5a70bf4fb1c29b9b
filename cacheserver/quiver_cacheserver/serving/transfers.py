"""Whole files by digest: ``PUT``, ``GET`` and ``HEAD`` of shards and manifests.

An upload is written as it arrives, compared with its name, and visible only then. ``GET`` serves what is resident and
never starts a fill: daemons fetch from one another this way, and must not make each other read the origin.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

import numpy as np
from aiohttp import web

from quiver.digest import Digest
from quiver.errors import BadRequest, Corrupt, DiskFailed
from quiver.shard import verified
from quiver.store import Kind, Writing
from quiver.transport.liveness import SLOWEST_BYTES_PER_SECOND
from quiver.wire import SHARD_TYPE
from quiver_cacheserver.bounds import open_manifest
from quiver_cacheserver.budget import Cost, Resource
from quiver_cacheserver.config import UPLOAD_BYTES_MAX
from quiver_cacheserver.manifests import MANIFEST_BYTES_MAX
from quiver_cacheserver.node import Node
from quiver_cacheserver.residency.filler import Admission
from quiver_cacheserver.serving.payload import Payload
from quiver_cacheserver.serving.requests import caller_of, unhurried
from quiver_cacheserver.serving.sender import Sender

PIECE_BYTES_MAX: Final = 1 << 20  # written at a time
PIECE_BYTES_MIN: Final = 16 << 10  # of a client that sends byte by byte: bytes are not written one by one
FIRST_BYTES: Final = 4 << 20  # of an upload arrive before space is reserved for all of it, which may evict shards
SILENCE_SECONDS: Final = 10.0  # without a byte, and of delay in all: see ``Arriving``


class Transfers:
    """The routes of whole files."""

    def __init__(self, node: Node, sender: Sender) -> None:
        self._node = node
        self._sender = sender
        self._checking = asyncio.Lock()  # manifests are checked one at a time: each is read into memory for it

    async def get(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        unhurried(request)
        digest = Digest.parse(request.match_info["digest"])
        node, caller = self._node, caller_of(request)
        with node.budgets.holding(caller.budget, Resource.FILES):
            if kind is Kind.SHARD:
                file = await node.open_shard(digest, caller.scope)
            else:
                loop = asyncio.get_running_loop()
                file = await loop.run_in_executor(node.disk_threads, node.manifests.open_file, digest, caller.scope)
            headers = {"Content-Type": SHARD_TYPE, "Content-Length": str(file.size_bytes)}
            start, size = np.zeros(1, np.int64), np.asarray([file.size_bytes])
            shards = [digest] if kind is Kind.SHARD else []
            whole = Payload([file], start, start, size, shards=shards) if request.method == "GET" else None
            return await self._sender.respond(request, headers, b"", whole)

    async def put(self, request: web.Request, kind: Kind) -> web.Response:
        digest = Digest.parse(request.match_info["digest"])
        size_bytes = request.content_length
        limit = UPLOAD_BYTES_MAX if kind is Kind.SHARD else MANIFEST_BYTES_MAX
        if size_bytes is None or not 0 < size_bytes <= limit:
            raise BadRequest(f"the request must have a Content-Length, of 1 to {limit} bytes")
        unhurried(request)
        caller, node, now = caller_of(request), self._node, time.monotonic()
        client, budgets = caller.budget, node.budgets
        if budgets.left(client, Cost.WORK_SECONDS, now) <= 0:
            raise budgets.refusal(Cost.WORK_SECONDS, client, now)
        with budgets.holding(client, Resource.UPLOADS):
            arriving = Arriving(request)
            first = [await arriving.piece(size_bytes)]
            while (here := sum(map(len, first))) < min(FIRST_BYTES, size_bytes):
                first.append(await arriving.piece(size_bytes - here))
            with budgets.holding(client, Resource.UPLOAD_BYTES, size_bytes):
                is_new = await self._take(arriving, first, kind, digest, size_bytes)
        if kind is Kind.SHARD:
            node.uploaded(digest, Admission("upload", client, caller.scope, is_new), size_bytes)
        else:
            node.manifests.uploaded(digest, client, caller.scope)
        return web.Response(status=201)

    async def _take(self, arriving: Arriving, first: list[bytes], kind: Kind, digest: Digest, size_bytes: int) -> bool:
        """Write the body by the store's recipe; return ``Admission.is_new``. What does not verify leaves nothing."""
        loop = asyncio.get_running_loop()
        threads = self._node.disk_threads
        room = self._node.rooms.reserve(kind, digest, size_bytes, arriving.caller.budget, arriving.caller.scope)
        try:
            writing = await loop.run_in_executor(threads, room.__enter__)
            try:
                await self._receive(arriving, first, writing)
                async with self._checking if kind is Kind.MANIFEST else contextlib.nullcontext():
                    return await loop.run_in_executor(threads, self._commit, writing, arriving.caller.budget)
            finally:
                await asyncio.shield(loop.run_in_executor(threads, room.__exit__, None, None, None))
        except Corrupt:
            self._node.counters.count("corruptions", "upload")
            raise
        except DiskFailed as error:
            self._node.disk.failed(error, size_bytes)
            raise

    async def _receive(self, arriving: Arriving, first: list[bytes], writing: Writing) -> None:
        loop = asyncio.get_running_loop()
        left = writing.size_bytes
        while left:
            piece = first.pop(0) if first else await arriving.piece(left)
            left -= len(piece)
            await loop.run_in_executor(self._node.disk_threads, writing.write, piece)

    def _commit(self, writing: Writing, client: str) -> bool:
        """In a thread: compare what was written with its name, and make it visible; return ``Admission.is_new``."""
        began = time.monotonic()
        try:
            _check(writing)
        finally:
            now = time.monotonic()
            self._node.budgets.charge(client, Cost.WORK_SECONDS, now - began, now)
        # The disk's time, which is not the client's.
        return writing.commit(shares=self._node.verification.is_resident(writing.digest))


class Arriving:
    """An upload's body, as its client sends it: the daemon waits for it, within limits.

    A client that sends a byte now and then could otherwise occupy one of the concurrent uploads, and disk space, for as
    long as it likes. So a minimum rate, the one below which readers give up, bounds the time spent waiting for it. Time
    that the disk needs does not count against the client.
    """

    def __init__(self, request: web.Request) -> None:
        self.caller = caller_of(request)
        self._content = request.content
        self._left_seconds = SILENCE_SECONDS

    async def piece(self, size_bytes_max: int) -> bytes:
        """Return the next piece. Raises ``BadRequest`` if it does not arrive in time."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(min(self._left_seconds, SILENCE_SECONDS)):
                piece = await self._content.read(min(PIECE_BYTES_MAX, size_bytes_max))
                if len(piece) < min(PIECE_BYTES_MIN, size_bytes_max):
                    piece += await self._content.readexactly(min(PIECE_BYTES_MIN, size_bytes_max) - len(piece))
        except TimeoutError as error:
            raise BadRequest("the upload stopped midway, or is too slow") from error
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise BadRequest("the upload ended early") from error
        self._left_seconds += len(piece) / SLOWEST_BYTES_PER_SECOND - (time.monotonic() - began)
        return piece


def _check(writing: Writing) -> None:
    if writing.kind is Kind.SHARD:
        verified(writing.digest, memoryview(writing.content()), "upload")
    else:
        open_manifest(writing.path, writing.digest)
