"""The routes for operators: who reads what, how the cache is shared, and pins and evictions. JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from quiver.errors import BadRequest
from quiver.identity import check_name
from quiver.malformed import MALFORMED
from quiver.overview import REQUEST_BYTES_MAX, DatasetRequest, ProbeRequest
from quiver_cacheserver.access.caller import Caller
from quiver_cacheserver.node import Node
from quiver_cacheserver.overview.overview import Overview
from quiver_cacheserver.serving.requests import body_of, caller_of, unhurried

Verb = Callable[[DatasetRequest, Caller], Awaitable[msgspec.Struct]]


class Operator:
    """The routes. ``overview`` answers them."""

    def __init__(self, node: Node, overview: Overview) -> None:
        self._node = node
        self._overview = overview

    async def jobs(self, request: web.Request) -> web.Response:
        """``GET /v1/jobs``."""
        return _json(self._overview.jobs(caller_of(request)))

    async def datasets(self, request: web.Request) -> web.Response:
        """``GET /v1/datasets``."""
        return _json(await self._overview.datasets(caller_of(request)))

    async def allocation(self, request: web.Request) -> web.Response:
        """``GET /v1/allocation``."""
        return _json(self._overview.allocation(caller_of(request)))

    async def pin(self, request: web.Request) -> web.Response:
        """``POST /v1/pin``."""
        return await self._do(request, self._overview.pin)

    async def unpin(self, request: web.Request) -> web.Response:
        """``POST /v1/unpin``."""
        return await self._do(request, self._overview.unpin)

    async def evict(self, request: web.Request) -> web.Response:
        """``POST /v1/evict``."""
        unhurried(request)  # it removes as many files as the dataset has shards
        return await self._do(request, self._overview.evict)

    async def probe(self, request: web.Request) -> web.Response:
        """``POST /v1/probe``."""
        async with body_of(request, self._node.budgets, REQUEST_BYTES_MAX) as body:
            try:
                asked = msgspec.json.decode(body, type=ProbeRequest)
                check_name("job", asked.job)
            except (*MALFORMED, ValueError) as error:
                raise BadRequest(f"a request to probe a job: {error}") from error
        return _json(self._overview.probe(asked, caller_of(request)))

    async def _do(self, request: web.Request, verb: Verb) -> web.Response:
        async with body_of(request, self._node.budgets, REQUEST_BYTES_MAX) as body:
            try:
                asked = msgspec.json.decode(body, type=DatasetRequest)
                check_name("name", asked.name)
            except (*MALFORMED, ValueError) as error:
                raise BadRequest(f"a request about a dataset: {error}") from error
        return _json(await verb(asked, caller_of(request)))


def _json(value: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
