"""Turns the notice that a spot machine is about to be taken into a drain.

A cloud says so at a URL of the machine's metadata, or a program of the operator's writes a file. ``said`` is the one
place that knows the forms; what cannot be read is no notice, since a drain by mistake takes a healthy daemon away. A
notice begins one drain: after ``quiver undrain`` the same notice begins none, until it has been gone in between.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final, NamedTuple, Self
from urllib.parse import urlsplit

import aiohttp
import msgspec

from quiver.location import shown
from quiver.malformed import MALFORMED
from quiver.prepared import prepare
from quiver_cacheserver.draining.drain import Drain

log = logging.getLogger(__name__)

POLL_SECONDS: Final = 1.0  # a cloud gives at least 30 s
ANSWER_SECONDS: Final = 2.0
NOTICE_BYTES_MAX: Final = 64 << 10
TOKEN_BYTES_MAX: Final = 4096
MAX_SECONDS: Final = 3600.0  # a clock that is wrong must not make a deadline of days
MARGIN_SECONDS: Final = 2.0  # before the time that the notice names: it is when the machine begins to stop
# Each cloud wants a header of its own, which shows that the request is no forwarded one, and ignores the others'.
HEADERS: Final = {"Metadata-Flavor": "Google", "Metadata": "true"}
NOTHING: Final = ("", "false", "none", "0")  # what is there while there is no notice
AWS_TOKEN_PATH: Final = "/latest/api/token"  # noqa: S105 - a path
AZURE_ENDINGS: Final = ("preempt", "terminate", "redeploy")


class Notice(NamedTuple):
    """The machine will be taken. ``at``: when, in seconds since 1970, if the notice says so."""

    at: float | None = None


class _Event(msgspec.Struct, rename="pascal"):
    """A scheduled event of Azure, which lists those of all machines of a set."""

    event_type: str = ""
    not_before: str = ""
    resources: list[str] = []


class _Told(msgspec.Struct):
    """AWS's ``{"action", "time"}``, and Azure's ``{"Events"}``."""

    action: Annotated[str, msgspec.Meta(max_length=64)] = ""
    time: str = ""
    events: list[_Event] | None = msgspec.field(default=None, name="Events")


def said(content: bytes, names: Sequence[str], *, of_file: bool = False) -> Notice | None:
    """Return the notice that a file or an answer contains; ``None`` if it contains none.

    ``names``: of this machine. A list of scheduled events is a notice if one takes a machine of such a name. JSON that
    is cut off is none: it is read again a moment later. Nor is what a URL answers in JSON of another kind, or a page of
    HTML, as a proxy answers. Any other text is one, unless it is empty, ``FALSE``, ``NONE`` or ``0``; it may be the
    time alone. ``of_file``: a program wrote it, and may have written anything.
    """
    text = content.decode("utf-8", "replace").strip()
    if text.lower() in NOTHING or (text.startswith("<") and not of_file):
        return None
    if not text.startswith("{" if of_file else ("{", "[")):
        return Notice(_seconds(text))
    try:
        told = msgspec.json.decode(text, type=_Told)
    except MALFORMED:
        return None
    if told.events is None:
        return Notice(_seconds(told.time)) if told.action or told.time or of_file else None
    own = {name.lower() for name in names}
    for event in told.events:
        is_own = not event.resources or bool(own.intersection(it.lower() for it in event.resources))
        if is_own and event.event_type.lower() in AZURE_ENDINGS:
            return Notice(_seconds(event.not_before))
    return None


def _seconds(text: str) -> float | None:
    """Return a time as clouds write it (RFC 3339, or RFC 7231) in seconds since 1970."""
    for form in ("%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%dT%H:%M:%S.%f%z", "%a, %d %b %Y %H:%M:%S GMT"):
        try:
            at = datetime.strptime(text, form)
        except ValueError:
            continue
        return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
    return None


def drain_seconds_of(notice: Notice, now: float, drain_seconds: float) -> float:
    """Return for how long to drain at a notice: until shortly before its time.

    If it names none, or one that has passed, ``drain_seconds``: this machine is still there, and a clock may be wrong.
    """
    left_seconds = notice.at - MARGIN_SECONDS - now if notice.at is not None else 0.0
    return min(left_seconds, MAX_SECONDS) if left_seconds > 0 else min(drain_seconds, MAX_SECONDS)


async def drain_on_notice(source: str, drain: Drain, drain_seconds: float, names: Sequence[str] = ()) -> None:
    """Look for a notice until cancelled, and begin a drain for each.

    ``drain_seconds``: how long one takes whose notice does not say when.
    """
    names = names or (socket.gethostname(), socket.gethostname().partition(".")[0])
    known, fault = False, ""
    async with _Source(source) as watched:
        while True:
            try:
                content = await watched.look()
            except (OSError, aiohttp.ClientError, TimeoutError, ValueError) as error:
                if str(error) != fault:
                    log.warning("no eviction notice can be read from %s: %s", shown(source), shown(str(error), 200))
                fault = str(error)
            else:
                fault = ""
                notice = said(content, names, of_file=not watched.is_url) if content is not None else None
                if notice is not None and not known:
                    seconds = drain_seconds_of(notice, time.time(), drain_seconds)
                    await drain.begin(seconds, "this machine is about to be taken")
                known = notice is not None
            await asyncio.sleep(POLL_SECONDS)


class _Source:
    """A file or URL that is looked at again and again."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.is_url = "://" in source
        self._http: aiohttp.ClientSession | None = None
        self._token = ""

    async def __aenter__(self) -> Self:
        if self.is_url:
            limit = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
            self._http = aiohttp.ClientSession(timeout=limit, headers=HEADERS)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def look(self) -> bytes | None:
        """Return what it contains now; ``None`` if there is nothing. Raises what keeps it from being read."""
        if self._http is None:
            return await asyncio.get_running_loop().run_in_executor(None, _file, Path(self._source))
        status, content = await self._get(self._http)
        if status == 401 and await self._take_token(self._http):  # AWS answers only to who can send a PUT
            status, content = await self._get(self._http)
        if status in (404, 204):
            return None
        if status != 200:
            raise ValueError(f"it answers {status}")
        return content

    async def _get(self, http: aiohttp.ClientSession) -> tuple[int, bytes]:
        headers = {"X-aws-ec2-metadata-token": self._token} if self._token else {}
        async with http.get(self._source, headers=headers, allow_redirects=False) as answer:
            return answer.status, await _limited(answer, NOTICE_BYTES_MAX)

    async def _take_token(self, http: aiohttp.ClientSession) -> bool:
        parts = urlsplit(self._source)
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
        async with http.put(
            f"{parts.scheme}://{parts.netloc}{AWS_TOKEN_PATH}", headers=headers, allow_redirects=False
        ) as answer:
            token = (await _limited(answer, TOKEN_BYTES_MAX)).decode("ascii", "replace").strip()
            self._token = token if answer.status == 200 and token.isprintable() else ""
        return bool(self._token)


async def _limited(answer: aiohttp.ClientResponse, size_bytes_max: int) -> bytes:
    """Return a body, or what of it is not too much."""
    data = bytearray()
    async for piece in answer.content.iter_chunked(4096):
        data += piece
        if len(data) >= size_bytes_max:
            break
    return bytes(data[:size_bytes_max])


def _file(path: Path) -> bytes | None:
    """Return a file's content; that it is there and empty says as much as any text does."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError("it is no regular file")
        return os.read(fd, NOTICE_BYTES_MAX) or b"this file"
    finally:
        os.close(fd)


prepare(_Event, _Told)
