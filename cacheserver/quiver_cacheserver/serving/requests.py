"""What a route needs of its request's connection: the client, the deadline of the answer, and the body."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from math import inf
from typing import Final

from aiohttp import web

from quiver.domain import HEADER, SINGLE, Domain
from quiver.errors import BadRequest
from quiver.introduction import HEADER as INTRODUCTION
from quiver.introduction import introduced
from quiver.transport.tls import NOBODY, Identity
from quiver_cacheserver.access.caller import Caller
from quiver_cacheserver.budget import Budgets, Resource, address_of
from quiver_cacheserver.node import Node
from quiver_cacheserver.residency.readers import ReadBy

BODY_SECONDS_MAX: Final = 10.0
ANSWER_SECONDS: Final = 60.0  # to receive a report's body, do the work and send the answer
_CALLER: Final = web.RequestKey("caller", Caller)


class Timed(web.RequestHandler):
    """A connection with a deadline. ``listening.Connection`` is one."""

    __slots__ = ("address", "deadline", "identity")

    address: str
    identity: Identity  # whom the client's certificate names; without TLS nobody
    deadline: float  # of the event loop's time; the connection is closed when it has passed

    def begin(self) -> None:
        """Start the usual deadline for the answer: the head of a request has arrived."""
        raise NotImplementedError


def client_of(request: web.Request) -> str:
    """Return the address that a request came from, as the budgets of connections name it."""
    protocol = request.protocol
    if isinstance(protocol, Timed):
        return protocol.address
    return address_of(request.transport.get_extra_info("peername") if request.transport is not None else None)


def admitted(request: web.Request, node: Node, verb: str) -> Caller:
    """Return who sent a request, if it may use this verb. Raises ``Unauthenticated`` and ``Forbidden``."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    identity = identity_of(request)
    caller = node.access.admit(
        client_of(request),
        token.strip() if scheme.lower() == "bearer" else "",
        verb,
        is_member=bool(identity.node),
        is_certified=node.tls is None or identity.is_known,
    )
    if caller.is_member:
        named = request.headers.get(HEADER)
        caller = replace(caller, acting_for=SINGLE if named is None else Domain.parse(named))
    request[_CALLER] = caller
    return caller


def caller_of(request: web.Request) -> Caller:
    """Return who sent a request that was ``admitted``, as every request is before its route runs."""
    caller: Caller = request[_CALLER]
    return caller


def read_by(request: web.Request) -> ReadBy:
    """Return who reads, as a request that was ``admitted`` introduces it."""
    caller, said = caller_of(request), introduced(request.headers.get(INTRODUCTION, ""))
    return ReadBy(caller.budget, caller.scope, caller.tenant, said)


def identity_of(request: web.Request) -> Identity:
    """Return whom the certificate of a request's connection names: a node of the rack, a client, or nobody."""
    protocol = request.protocol
    return protocol.identity if isinstance(protocol, Timed) else NOBODY


def began(request: web.Request) -> None:
    """Start the usual deadline for the answer to a request."""
    if isinstance(request.protocol, Timed):
        request.protocol.begin()


def unhurried(request: web.Request) -> None:
    """Disable the connection's deadline for this request: its route has a deadline of its own."""
    if isinstance(request.protocol, Timed):
        request.protocol.deadline = inf


@contextlib.asynccontextmanager
async def body_of(request: web.Request, budgets: Budgets, limit_bytes: int) -> AsyncIterator[bytes]:
    """Yield a request's body, which counts as held until the end of the block.

    Raises ``BadRequest`` if it is too large or too slow, ``OverCapacity`` if too much is held or arriving.
    """
    client, size_bytes = caller_of(request).budget, request.content_length
    if size_bytes is None or size_bytes > limit_bytes:
        raise BadRequest(f"the request must have a Content-Length, of at most {limit_bytes} bytes")
    with budgets.holding(client, Resource.BODY_BYTES, size_bytes):
        here = request.content.is_eof()  # usually it arrives with the head
        with contextlib.nullcontext() if here else budgets.holding(client, Resource.ARRIVING):
            try:
                async with asyncio.timeout(BODY_SECONDS_MAX):
                    body = await request.content.readexactly(size_bytes)
            except (TimeoutError, ConnectionError, asyncio.IncompleteReadError) as error:
                raise BadRequest("the body did not arrive") from error
        yield body
