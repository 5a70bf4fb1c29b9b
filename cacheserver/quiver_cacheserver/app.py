"""The routes of the daemon (docs/protocol.md), and the one place where errors become answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from math import ceil

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from quiver.errors import OverCapacity, QuiverError
from quiver.residency.messages import NEEDS_TYPE, REPORT_BYTES_MAX
from quiver.store import Kind
from quiver.wire import ErrorBody, RingView, message_of
from quiver_cacheserver.budget import Resource
from quiver_cacheserver.metrics import Collector
from quiver_cacheserver.node import Node
from quiver_cacheserver.reads import body_of, read
from quiver_cacheserver.residency.reports import INLINE_SHARDS_MAX
from quiver_cacheserver.streams import Streams
from quiver_cacheserver.timed import began, client_of
from quiver_cacheserver.transfers import Transfers

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(node: Node) -> web.Application:
    """Return the application for a node."""
    transfers = Transfers(node)
    streams = Streams(node)
    metrics = CollectorRegistry(auto_describe=False)
    metrics.register(Collector(node))

    async def ring(_: web.Request) -> web.Response:
        return _json(RingView.of(node.registry.ring))

    async def status(_: web.Request) -> web.Response:
        return _json(node.status())

    async def batch(request: web.Request) -> web.StreamResponse:
        return await read(request, node)

    async def needs(request: web.Request) -> web.Response:
        return await _take_report(request, node)

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        """Ready: registered, not on the way out, and able to cache what readers ask for."""
        wrong = [node.state] if node.state != "up" else node.status().faults
        if wrong:
            return web.Response(status=503, text="".join(f"{line}\n" for line in wrong), headers={"Retry-After": "1"})
        return web.Response(text="ok\n")

    async def numbers(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    app = web.Application(middlewares=[_errors])
    app.router.add_get("/v1/ring", ring)
    app.router.add_get("/v1/status", status)
    app.router.add_post("/v1/read", batch)
    app.router.add_get("/v1/stream", streams.serve)
    app.router.add_post("/v1/needs", needs)
    for kind in (Kind.SHARD, Kind.MANIFEST):
        path = f"/v1/{kind}/{{digest}}"
        app.router.add_get(path, _of(transfers.get, kind))
        app.router.add_put(path, _of(transfers.put, kind))

    async def end_streams(_: web.Application) -> None:
        streams.close()

    app.on_shutdown.append(end_streams)
    app.router.add_get("/healthz", healthy)
    app.router.add_get("/readyz", ready)
    app.router.add_get("/metrics", numbers)
    return app


async def _take_report(request: web.Request, node: Node) -> web.Response:
    """Answer one report of needs."""
    client = client_of(request)
    with node.budgets.holding(client, Resource.REPORTS):
        async with body_of(request, node, REPORT_BYTES_MAX) as body:
            answer = await node.reports.take(body, client)
        if len(answer.seen) > INLINE_SHARDS_MAX:
            packed = await asyncio.get_running_loop().run_in_executor(None, answer.encode)
        else:
            packed = answer.encode()
        return web.Response(body=packed, content_type=NEEDS_TYPE)


def _of(route: Callable[[web.Request, Kind], Awaitable[web.StreamResponse]], kind: Kind) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await route(request, kind)

    return handle


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    began(request)
    try:
        return await handler(request)
    except ConnectionError as error:  # the client is gone: nobody reads an answer, and its number is theirs to choose
        log.debug("a request was given up by its client: %s", error)
        gone = web.Response(status=400)
        gone.force_close()
        return gone
    except QuiverError as error:
        headers = (
            {"Retry-After": str(max(ceil(error.retry_after_seconds), 1))} if isinstance(error, OverCapacity) else {}
        )
        return _json(ErrorBody(error.code, message_of(error)), error.status, headers)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _json(ErrorBody("http", error.reason), error.status, dict(_allow(error)))
    finally:
        began(request)  # a route that was unhurried is done; its answer has the usual time


def _allow(error: web.HTTPException) -> list[tuple[str, str]]:
    return [(name, value) for name, value in error.headers.items() if name.lower() == "allow"]


def _json(value: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json", headers=headers
    )
