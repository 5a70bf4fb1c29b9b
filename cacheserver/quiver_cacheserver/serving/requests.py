"""What a route may say to the connection that its request came on: whose it is, and how long its answer may take."""

from __future__ import annotations

from math import inf
from typing import Final

from aiohttp import web

from quiver_cacheserver.budget import address_of

ANSWER_SECONDS: Final = 60.0  # for a report's body, the work, and the answer to be taken


class Timed(web.RequestHandler):
    """A connection with a deadline. ``listening.Connection`` is one."""

    __slots__ = ("address", "deadline")

    address: str
    deadline: float  # of the event loop's time; the connection is closed when it has passed

    def begin(self) -> None:
        """A request has its head here."""
        raise NotImplementedError


def client_of(request: web.Request) -> str:
    """Return under whose budget a request falls."""
    protocol = request.protocol
    if isinstance(protocol, Timed):
        return protocol.address
    return address_of(request.transport.get_extra_info("peername") if request.transport is not None else None)


def began(request: web.Request) -> None:
    """Give the answer to a request the usual time."""
    if isinstance(request.protocol, Timed):
        request.protocol.begin()


def unhurried(request: web.Request) -> None:
    """Let this request take as long as its route lets it, which keeps the time itself."""
    if isinstance(request.protocol, Timed):
        request.protocol.deadline = inf
