"""The routes of the daemon (docs/protocol.md), and the one place where errors become answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Final, NamedTuple

import msgspec
from aiohttp import HttpVersion11, web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from quiver.errors import QuiverError, Unauthenticated, answer_of
from quiver.residency.messages import NEEDS_TYPE, REPORT_BYTES_MAX
from quiver.store import Kind
from quiver.wire import ErrorBody, RingView
from quiver_cacheserver.access.rights import READYZ_REASONS, RIGHTS, allows
from quiver_cacheserver.budget import Resource
from quiver_cacheserver.metrics import Collector
from quiver_cacheserver.node import Node
from quiver_cacheserver.overview.overview import Overview
from quiver_cacheserver.residency.reports import INLINE_SHARDS_MAX
from quiver_cacheserver.serving.draining import Draining
from quiver_cacheserver.serving.operator import Operator
from quiver_cacheserver.serving.poller import Poller
from quiver_cacheserver.serving.reads import read_route
from quiver_cacheserver.serving.requests import admitted, began, body_of, caller_of
from quiver_cacheserver.serving.sender import Sender
from quiver_cacheserver.serving.streams import Streams
from quiver_cacheserver.serving.transfers import Transfers
from quiver_cacheserver.serving.turns import Places
from quiver_cacheserver.serving.verbs import Verbs

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

POLLER: Final = web.AppKey("poller", Poller)
SWEEP_SECONDS: Final = 1.0  # the precision of the deadlines of streams and payloads


class Route(NamedTuple):
    """A route of the daemon; ``_routes`` has all."""

    method: str
    path: str
    handler: Handler

    @property
    def verb(self) -> str:
        """The route's name in the table of rights, which has every route."""
        return f"{self.method} {self.path}"


def make_app(node: Node) -> web.Application:
    """Return the application for a node. Its poller is ``app[POLLER]``."""
    poller = Poller(node.budgets)
    sender = Sender(node, poller)
    reading = Places(node.budgets, Resource.READS)
    streams = Streams(node, poller, reading)
    overview = Overview(node)
    app = web.Application(middlewares=[_errors])
    app[POLLER] = poller
    for route in [*_routes(node, streams, sender, reading), *_for_operators(node, overview)]:
        handler = _guarded(node, route)
        if route.method == "GET":
            app.router.add_get(route.path, handler, expect_handler=_continue)  # and HEAD
        else:
            app.router.add_route(route.method, route.path, handler, expect_handler=_continue)

    async def end_answers(_: web.Application) -> None:
        streams.close()
        poller.end_all()  # and answers by HTTP

    app.on_shutdown.append(end_answers)
    app.cleanup_ctx.append(partial(_polling, poller))
    app.cleanup_ctx.append(partial(_watching, overview))
    return app


def _routes(node: Node, streams: Streams, sender: Sender, reading: Places) -> list[Route]:
    """Return every route. The table of rights names who may use each (``access.rights``)."""
    transfers, verbs, draining = Transfers(node, sender), Verbs(node), Draining(node)
    return [
        # data
        Route("POST", "/v1/read", read_route(node, sender, reading)),
        Route("GET", "/v1/stream", streams.serve),
        Route("GET", "/v1/shards/{digest}", _of(transfers.get, Kind.SHARD)),
        Route("PUT", "/v1/shards/{digest}", _of(transfers.put, Kind.SHARD)),
        Route("GET", "/v1/manifests/{digest}", _of(transfers.get, Kind.MANIFEST)),
        Route("PUT", "/v1/manifests/{digest}", _of(transfers.put, Kind.MANIFEST)),
        # what is to be resident
        Route("POST", "/v1/fill", verbs.fill),
        Route("POST", "/v1/forgo", verbs.forgo),
        Route("POST", "/v1/recheck", verbs.recheck),
        Route("POST", "/v1/needs", partial(_take_report, node)),
        # leaving the rack
        Route("POST", "/v1/handover", draining.hand_over),
        Route("POST", "/v1/drain", draining.begin),
        Route("GET", "/v1/drain", draining.status),
        Route("DELETE", "/v1/drain", draining.end),
        # the daemon itself
        Route("GET", "/v1/ring", partial(_ring, node)),
        Route("GET", "/v1/status", partial(_status, node)),
        Route("GET", "/healthz", _healthy),
        Route("GET", "/readyz", partial(_ready, node)),
    ]


def _for_operators(node: Node, overview: Overview) -> list[Route]:
    """Return the routes that tell names."""
    operator = Operator(node, overview)
    return [
        Route("GET", "/metrics", _numbers(node, overview)),
        Route("GET", "/v1/jobs", operator.jobs),
        Route("GET", "/v1/datasets", operator.datasets),
        Route("GET", "/v1/allocation", operator.allocation),
        Route("POST", "/v1/pin", operator.pin),
        Route("POST", "/v1/unpin", operator.unpin),
        Route("POST", "/v1/evict", operator.evict),
        Route("POST", "/v1/probe", operator.probe),
    ]


def _guarded(node: Node, route: Route) -> Handler:
    """Return the route's handler behind access control: it does not run for a request that may not use it."""
    if route.verb not in RIGHTS:
        raise AssertionError(f"{route.verb} is missing in the table of rights")

    async def handle(request: web.Request) -> web.StreamResponse:
        admitted(request, node, route.verb)
        return await route.handler(request)

    return handle


async def _polling(poller: Poller, _: web.Application) -> AsyncIterator[None]:
    """Run the poller for as long as the application runs."""
    loop = asyncio.get_running_loop()
    poller.start()
    sweeping = loop.create_task(_sweep(poller), name="deadlines")
    yield
    sweeping.cancel()
    await asyncio.wait([sweeping])
    await loop.run_in_executor(None, poller.stop)


async def _watching(overview: Overview, _: web.Application) -> AsyncIterator[None]:
    """Look for the datasets of pins for as long as the application runs."""
    watching = asyncio.get_running_loop().create_task(overview.watch_pins(), name="pins")
    yield
    watching.cancel()
    await asyncio.wait([watching])


async def _sweep(poller: Poller) -> None:
    """End streams and answers that wait past their deadlines, until cancelled."""
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        poller.sweep()


async def _ring(node: Node, _: web.Request) -> web.Response:
    return _json(RingView.of(node.registry.ring))


async def _status(node: Node, _: web.Request) -> web.Response:
    return _json(node.status())


async def _healthy(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")


async def _ready(node: Node, request: web.Request) -> web.Response:
    """Ready: registered, not draining, and able to cache what readers ask for."""
    wrong = [node.state] if node.state != "up" else node.status().faults
    if wrong and not allows(caller_of(request), READYZ_REASONS):
        wrong = ["not ready"]
    if wrong:
        return web.Response(status=503, text="".join(f"{line}\n" for line in wrong), headers={"Retry-After": "1"})
    return web.Response(text="ok\n")


def _numbers(node: Node, overview: Overview) -> Handler:
    metrics = CollectorRegistry(auto_describe=False)
    metrics.register(Collector(node))

    async def numbers(request: web.Request) -> web.Response:
        named = CollectorRegistry(auto_describe=False)
        named.register(await overview.collector(caller_of(request)))
        body = generate_latest(metrics) + generate_latest(named)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    return numbers


async def _take_report(node: Node, request: web.Request) -> web.Response:
    """Answer one report of needs."""
    caller = caller_of(request)
    client = caller.budget
    with node.budgets.holding(client, Resource.REPORTS):
        async with body_of(request, node.budgets, REPORT_BYTES_MAX) as body:
            answer = await node.reports.take(body, client, caller.scope, tenant=caller.tenant)
        if len(answer.seen) > INLINE_SHARDS_MAX:
            packed = await asyncio.get_running_loop().run_in_executor(None, answer.encode)
        else:
            packed = answer.encode()
        return web.Response(body=packed, content_type=NEEDS_TYPE)


def _of(route: Callable[[web.Request, Kind], Awaitable[web.StreamResponse]], kind: Kind) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await route(request, kind)

    return handle


async def _continue(request: web.Request) -> None:
    """Answer ``Expect``. aiohttp's own handler repeats the header in an answer, also where it cannot be encoded."""
    if request.headers["Expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed
    if request.version == HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # this was not the answer


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    began(request)
    answer = await _answered(request, handler)
    if "Upgrade" in request.headers and answer.status != HTTPStatus.SWITCHING_PROTOCOLS:
        answer.force_close()  # the parser drops what follows an upgrade in the same segment, perhaps a request
    return answer


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ConnectionError as error:  # the client left: nobody reads the answer, and this may happen often
        log.debug("a client abandoned its request: %s", error)
        gone = web.Response(status=400)
        gone.force_close()
        return gone
    except QuiverError as error:
        told = answer_of(error)
        asks = {"WWW-Authenticate": "Bearer"} if told.status == Unauthenticated.status else {}  # HTTP requires it
        return _json(ErrorBody(told.code, told.message), told.status, {**told.headers, **asks})
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _json(ErrorBody("http", error.reason), error.status, dict(_allow(error)))
    finally:
        began(request)  # an unhurried route has finished: the usual deadline applies to its answer


def _allow(error: web.HTTPException) -> list[tuple[str, str]]:
    return [(name, value) for name, value in error.headers.items() if name.lower() == "allow"]


def _json(value: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json", headers=headers
    )
