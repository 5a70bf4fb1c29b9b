"""Whole files by digest: ``PUT``, ``GET`` and ``HEAD`` of shards and manifests.

What is put is written as it arrives, compared with its name and only then visible. ``GET`` hands out what is resident
and never makes the daemon fill: neighbours ask one another this way, and must not send each other to the origin.
"""

from __future__ import annotations

import asyncio
from typing import Final

import numpy as np
from aiohttp import web

from quiver.digest import Digest
from quiver.errors import BadRequest, Corrupt, DiskFailed, Misconfigured, OverCapacity
from quiver.manifest import Manifest
from quiver.shard import verified
from quiver.store import Kind, Writing
from quiver.wire import SHARD_TYPE
from quiver_cacheserver.config import UPLOAD_BYTES_MAX
from quiver_cacheserver.manifests import MANIFEST_BYTES_MAX
from quiver_cacheserver.node import Node
from quiver_cacheserver.reads import respond
from quiver_cacheserver.sending import Payload

UPLOADS_AT_ONCE: Final = 16
CHUNK_BYTES: Final = 1 << 20
SILENCE_SECONDS: Final = 10.0


class Transfers:
    """The routes of whole files."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._uploads = 0

    async def get(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        digest = Digest.parse(request.match_info["digest"])
        if kind is Kind.SHARD:
            file = await self._node.open_shard(digest)
        else:
            loop = asyncio.get_running_loop()
            file = await loop.run_in_executor(
                self._node.disk_threads, self._node.store.open_file, Kind.MANIFEST, digest
            )
        headers = {"Content-Type": SHARD_TYPE, "Content-Length": str(file.size_bytes)}
        whole = Payload([file], np.zeros(1, np.int64), np.zeros(1, np.int64), np.asarray([file.size_bytes]))
        whole.shards = [digest] if kind is Kind.SHARD else []
        return await respond(request, self._node, headers, b"", whole if request.method == "GET" else None)

    async def put(self, request: web.Request, kind: Kind) -> web.Response:
        digest = Digest.parse(request.match_info["digest"])
        size_bytes = request.content_length
        limit = UPLOAD_BYTES_MAX if kind is Kind.SHARD else MANIFEST_BYTES_MAX
        if size_bytes is None or not 0 < size_bytes <= limit:
            raise BadRequest(f"a body with a Content-Length of 1 to {limit} bytes is wanted")
        if self._uploads >= UPLOADS_AT_ONCE:
            self._node.counters.overloads += 1
            raise OverCapacity(f"{UPLOADS_AT_ONCE} uploads are under way", 1.0)
        self._uploads += 1
        try:
            await self._take(request, kind, digest, size_bytes)
        finally:
            self._uploads -= 1
        if kind is Kind.SHARD:
            self._node.fills.arrived(digest)
            self._node.admitted(digest, "upload")
            self._node.counters.uploaded_bytes += size_bytes
        else:
            self._node.manifests.forget_missing(digest)
        return web.Response(status=201)

    async def _take(self, request: web.Request, kind: Kind, digest: Digest, size_bytes: int) -> None:
        """Write the body under the store's recipe. What does not verify leaves nothing."""
        loop = asyncio.get_running_loop()
        threads = self._node.disk_threads
        room = self._node.store.reserve(kind, digest, size_bytes)
        try:
            writing = await loop.run_in_executor(threads, room.__enter__)
            try:
                await self._receive(request, writing)
                await loop.run_in_executor(threads, _commit, writing, kind, digest)
            finally:
                await asyncio.shield(loop.run_in_executor(threads, room.__exit__, None, None, None))
        except Corrupt:
            self._node.counters.count("corruptions", "upload")
            raise
        except DiskFailed as error:
            self._node.disk_failed(error, size_bytes)
            raise

    async def _receive(self, request: web.Request, writing: Writing) -> None:
        loop = asyncio.get_running_loop()
        left = writing.size_bytes
        while left:
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    chunk = await request.content.read(min(CHUNK_BYTES, left))
            except (TimeoutError, ConnectionError) as error:
                raise BadRequest("the upload stopped midway") from error
            if not chunk:
                raise BadRequest("the upload ended early")
            left -= len(chunk)
            await loop.run_in_executor(self._node.disk_threads, writing.write, chunk)


def _commit(writing: Writing, kind: Kind, digest: Digest) -> None:
    content = memoryview(writing.content())
    if kind is Kind.SHARD:
        verified(digest, content, "upload")
    else:
        if Digest.of(content) != digest:
            raise Corrupt("the manifest does not hash to its name", "upload")
        try:
            Manifest.open(writing.path)
        except (BadRequest, Misconfigured) as error:
            raise type(error)(str(error).replace(str(writing.path), "the manifest")) from error
    writing.commit()
