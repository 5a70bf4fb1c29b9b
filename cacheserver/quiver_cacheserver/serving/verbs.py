"""The verbs about whole shards, without reading them: fill, forgo, recheck (MessagePack, docs/protocol.md).

A read can request the same by flags, which older clients use; both make the same calls of the node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from aiohttp import web

from quiver.digest import Bytes, Digest
from quiver.wire import (
    MSGPACK_TYPE,
    SHARDS_REQUEST_BYTES_MAX,
    FillRequest,
    ForgoRequest,
    RangeStatus,
    RecheckRequest,
    ShardStatuses,
    shards_in,
)
from quiver_cacheserver.budget import Resource
from quiver_cacheserver.node import Node
from quiver_cacheserver.serving.absence import Absence
from quiver_cacheserver.serving.reads import charge
from quiver_cacheserver.serving.requests import body_of, caller_of, unhurried
from quiver_cacheserver.slices import SLICE

T = TypeVar("T")


class Verbs:
    """The routes about whole shards."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def fill(self, request: web.Request) -> web.Response:
        """``POST /v1/fill``: fill shards; answer once they are resident, or when the client's wait has expired."""
        unhurried(request)  # it waits as long as the request says, up to a limit
        node, caller = self._node, caller_of(request)
        client, domain = caller.budget, caller.scope
        async with body_of(request, node.budgets, SHARDS_REQUEST_BYTES_MAX) as body:  # held while the fill waits
            asked = await self._unpacked(FillRequest.decode, body, client)
            with node.budgets.holding(client, Resource.WAITING):
                manifest = node.manifests.if_open(asked.manifest, domain)
                if manifest is None:
                    manifest = await node.manifests.get(asked.manifest, client, domain)
                listed = await node.fill_missing(asked.shards, manifest, asked.wait_ms / 1000, client, domain)
            statuses = bytearray()
            absence = Absence(node, listed, asked.manifest, caller)

            def look(some: Sequence[Digest]) -> None:
                for digest in some:
                    is_here = node.resident(digest, domain)
                    statuses.append(RangeStatus.PRESENT if is_here else absence.status_of(digest))

            await node.slices.walk(asked.shards, look)
        return web.Response(body=ShardStatuses(bytes(statuses)).encode(), content_type=MSGPACK_TYPE)

    async def forgo(self, request: web.Request) -> web.Response:
        """``POST /v1/forgo``: the client was chosen to upload these shards and cannot."""
        node, caller = self._node, caller_of(request)
        client, domain = caller.budget, caller.scope
        async with body_of(request, node.budgets, SHARDS_REQUEST_BYTES_MAX) as body:
            asked = await self._unpacked(ForgoRequest.decode, body, client)
            await node.slices.walk(asked.shards, lambda some: node.forgo(some, asked.manifest, client, domain))
        return web.Response(status=204)

    async def recheck(self, request: web.Request) -> web.Response:
        """``POST /v1/recheck``: a reader got wrong bytes of these shards: verify them before serving them again."""
        node, caller = self._node, caller_of(request)
        client, domain = caller.budget, caller.scope
        async with body_of(request, node.budgets, SHARDS_REQUEST_BYTES_MAX) as body:
            asked = await self._unpacked(RecheckRequest.decode, body, client)
            await node.slices.walk(asked.shards, lambda some: node.suspect(some, client, domain))
        return web.Response(status=204)

    async def _unpacked(self, decode: Callable[[Bytes], T], body: Bytes, client: str) -> T:
        """Return what a body asks for, charged to its client. Raises ``BadRequest`` and ``OverCapacity``."""
        count = shards_in(body)
        charge(self._node, count, client)
        async with self._node.slices.turn() if count > SLICE else contextlib.nullcontext():
            return decode(body)
