"""The routes of drains: what daemons say to one another, and what an operator asks for (docs/draining.md)."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
from aiohttp import web

from quiver.handover import HANDOVER_BYTES_MAX, DrainRequest, HandoverAnswer, HandoverRequest, Taken
from quiver.wire import MSGPACK_TYPE, decode_json
from quiver_cacheserver.budget import Resource
from quiver_cacheserver.node import Node
from quiver_cacheserver.serving.requests import body_of, caller_of, unhurried

DRAIN_BYTES_MAX: Final = 4096


class Draining:
    """The routes of a node's drain, and of others' drains."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def hand_over(self, request: web.Request) -> web.Response:
        """``POST /v1/handover``: another daemon drains and says what it holds."""
        unhurried(request)  # it waits as long as the request says, up to a limit
        node, caller = self._node, caller_of(request)
        async with body_of(request, node.budgets, HANDOVER_BYTES_MAX) as body:
            asked = HandoverRequest.decode(body)
            if node.state != "up":
                nothing = bytes([Taken.ABSENT])
                answer = HandoverAnswer(nothing * len(asked.shards), nothing * len(asked.manifests), "draining")
            else:
                # Who authenticates by a token may not say on whose account a shard is kept.
                trusted = caller.is_member or not node.access.requires_tokens
                with node.budgets.holding(caller.budget, Resource.WAITING):
                    answer = await node.receiver.answer(asked, caller.budget, caller.scope, trusted=trusted)
        return web.Response(body=answer.encode(), content_type=MSGPACK_TYPE)

    async def begin(self, request: web.Request) -> web.Response:
        """``POST /v1/drain``: leave placement and hand over."""
        async with body_of(request, self._node.budgets, DRAIN_BYTES_MAX) as body:
            asked: DrainRequest = decode_json(body, DrainRequest, "a drain")
        await self._node.drain.begin(asked.deadline_seconds, "an operator asked for it")
        await asyncio.sleep(0)  # the ring shows it by the time of the answer
        return self._status()

    async def status(self, request: web.Request) -> web.Response:
        """``GET /v1/drain``: how far it is."""
        return self._status()

    async def end(self, request: web.Request) -> web.Response:
        """``DELETE /v1/drain``: own shards again."""
        await self._node.drain.undrain()
        return self._status()

    def _status(self) -> web.Response:
        return web.Response(body=msgspec.json.encode(self._node.drain.status()), content_type="application/json")
