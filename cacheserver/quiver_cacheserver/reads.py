"""``POST /v1/read``: all that one reader wants of this daemon for a batch, in one answer.

Shards that are missing are brought in while the reader waits, as long as it said it would; the rest is answered by
status. What is present goes from the page cache to the socket, by a thread (``sending``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence, Set
from typing import Final

import numpy as np
import numpy.typing as npt
from aiohttp import web

from quiver.connections import SLOWEST_BYTES_PER_SECOND
from quiver.digest import Bytes, Digest
from quiver.errors import BadRequest, DiskFailed, NotFound, QuiverError
from quiver.store import Kind, OpenFile
from quiver.wire import (
    FORGO,
    READ_REQUEST_BYTES_MAX,
    READ_TYPE,
    RECHECK,
    RangeStatus,
    ReadRequest,
)
from quiver_cacheserver.budget import Cost, Resource
from quiver_cacheserver.node import Node
from quiver_cacheserver.residency.uploads import UPLOADS_PER_READER
from quiver_cacheserver.sending import Line, Payload
from quiver_cacheserver.timed import client_of, unhurried
from quiver_cacheserver.turns import SLICE, Turn

log = logging.getLogger(__name__)

BODY_SECONDS_MAX: Final = 10.0
FREE_SHARDS: Final = 4096  # of a read; each further one is charged
SHARD_SECONDS: Final = 10e-6  # what it takes to unpack one, look it up and answer for it
SEND_SECONDS_MAX: Final = 60.0  # without anything taken, and of delay in all: see ``Taking``


Answer = tuple[npt.NDArray[np.uint8], Payload]  # a status per range, and what is to be sent


async def read(request: web.Request, node: Node) -> web.StreamResponse:
    """Answer one batched read."""
    unhurried(request)
    async with body_of(request, node, READ_REQUEST_BYTES_MAX) as body:
        with Turn(node.reading, node.counters, client_of(request)) as turn:
            async with node.slices.turn() if ReadRequest.shards_named(body) > SLICE else contextlib.nullcontext():
                asked = unpacked(node, body, turn.client)
            statuses, payload = await gather(node, asked, turn)
            headers = {"Content-Type": READ_TYPE, "Content-Length": str(len(statuses) + payload.size_bytes)}
            return await respond(request, node, headers, statuses.tobytes(), payload)


@contextlib.asynccontextmanager
async def body_of(request: web.Request, node: Node, limit_bytes: int) -> AsyncIterator[bytes]:
    """Yield a request's body, which counts as held until the end of the block.

    Raises ``BadRequest`` if it is too large or too slow, ``OverCapacity`` if too much is held or on its way.
    """
    client, size_bytes = client_of(request), request.content_length
    if size_bytes is None or size_bytes > limit_bytes:
        raise BadRequest(f"a body with a Content-Length of at most {limit_bytes} is wanted")
    with node.budgets.holding(client, Resource.BODY_BYTES, size_bytes):
        here = request.content.is_eof()  # as that of most is, with the head
        with contextlib.nullcontext() if here else node.budgets.holding(client, Resource.ARRIVING):
            try:
                async with asyncio.timeout(BODY_SECONDS_MAX):
                    body = await request.content.readexactly(size_bytes)
            except (TimeoutError, ConnectionError, asyncio.IncompleteReadError) as error:
                raise BadRequest("the body did not arrive") from error
        yield body


def unpacked(node: Node, body: Bytes, client: str) -> ReadRequest:
    """Return what a body asks for, charged to its client. Raises ``BadRequest`` and ``OverCapacity``."""
    over = ReadRequest.shards_named(body) - FREE_SHARDS
    now = time.monotonic()
    if over > 0 and not node.budgets.spend(client, Cost.WORK_SECONDS, over * SHARD_SECONDS, now):
        raise node.budgets.refusal(Cost.WORK_SECONDS, client, now)
    return ReadRequest.decode(body)


def at_hand(node: Node, asked: ReadRequest, client: str) -> Answer | None:
    """In a thread: answer a read of which every shard is here and verified; ``None`` if it is not as simple as that."""
    if asked.flags or not all(map(node.resident, asked.shards)):
        return None
    read_from = _read_from(asked)
    files = _open_all(node, read_from)
    if files.count(None) > read_from.count(None):
        return None
    node.holders.read(asked.shards, client)
    return _answer(node, asked, files, [RangeStatus.PRESENT] * len(files))


async def gather(node: Node, asked: ReadRequest, turn: Turn) -> Answer:
    """Bring in what is missing, as long as the reader waits for it, and answer."""
    wanted = asked.shards
    if asked.flags & RECHECK:
        await node.slices.walk(wanted, lambda some: node.suspect(some, turn.client))
    manifest = node.manifests.if_open(asked.manifest)
    listed: Set[Digest] | None = None
    if asked.flags & FORGO or not all(map(node.resident, wanted)):
        async with turn.waiting():
            if manifest is None and asked.manifest is not None:
                manifest = await node.manifests.get(asked.manifest, turn.client)
            known = asked.manifest
            if asked.flags & FORGO and known is not None:
                await node.slices.walk(wanted, lambda some: node.forgo(some, known, turn.client))
            listed = await node.fill_missing(wanted, manifest, asked.wait_ms / 1000, turn.client)
    loop = asyncio.get_running_loop()
    opened = await loop.run_in_executor(node.disk_threads, _open_here, node, asked)
    files = opened[1]
    if listed is None and None in files:  # something was evicted meanwhile, or no range is of it
        listed = await node.listed(wanted, manifest)
    statuses = await _statuses(node, asked, turn.client, opened, listed or frozenset())
    await node.slices.walk(wanted, lambda some: node.holders.read(some, turn.client))
    if asked.manifest is not None:
        node.holders.read([asked.manifest], turn.client)
    async with node.slices.turn() if len(wanted) > SLICE else contextlib.nullcontext():
        return _answer(node, asked, files, statuses)


def _open_here(node: Node, asked: ReadRequest) -> tuple[list[Digest | None], list[OpenFile | None]]:
    """In a thread: return the shards that are here of those that a range is of, and their files."""
    if not len(asked.ranges):
        return [None] * len(asked.shards), [None] * len(asked.shards)
    here = [digest if digest is not None and node.resident(digest) else None for digest in _read_from(asked)]
    return here, _open_all(node, here)


async def _statuses(
    node: Node,
    asked: ReadRequest,
    client: str,
    opened: tuple[Sequence[Digest | None], Sequence[OpenFile | None]],
    listed: Set[Digest],
) -> list[RangeStatus]:
    """Return the status of each shard. ``opened``: whose files were to be opened, and those that were."""
    here, files = opened
    statuses: list[RangeStatus] = []
    uploads = 0

    def look(some: Sequence[Digest]) -> None:
        nonlocal uploads
        for digest in some:
            at = len(statuses)
            if files[at] is not None:
                status = RangeStatus.PRESENT
            elif here[at] is not None and node.resident(digest):
                status = RangeStatus.FAILED  # it is here, and the disk does not give it out
            else:
                status = node.absence(digest, listed, asked.manifest)
                if status is RangeStatus.UPLOAD and asked.manifest is not None:
                    if uploads < UPLOADS_PER_READER and node.choose_uploader(digest, asked.manifest, client):
                        uploads += 1
                    else:
                        status = RangeStatus.FILLING
            statuses.append(status)

    await node.slices.walk(asked.shards, look)
    return statuses


def _answer(
    node: Node, asked: ReadRequest, files: Sequence[OpenFile | None], of_shards: Sequence[RangeStatus]
) -> Answer:
    """Return the status of each range, which is its shard's unless it ends past that, and what is present."""
    numbers = asked.ranges["shard"]
    statuses = np.asarray([*of_shards, 0], np.uint8)[numbers]
    sizes = np.asarray([*(file.size_bytes if file else 0 for file in files), 0], np.uint64)[numbers]
    offsets, lengths = asked.ranges["offset"], asked.ranges["length"]
    outside = (offsets > sizes) | (lengths > sizes) | (offsets > sizes - np.minimum(lengths, sizes))
    statuses[(statuses == RangeStatus.PRESENT) & outside] = RangeStatus.BAD_RANGE
    present = statuses == RangeStatus.PRESENT
    opened = [file for file in files if file is not None]
    place = np.cumsum([file is not None for file in files]) - 1
    for status, count in enumerate(np.bincount(statuses).tolist()):
        if count:
            node.counters.count("ranges", RangeStatus(status).name.lower(), count)
    which = place[numbers[present]] if len(files) else np.zeros(0, np.int64)
    payload = Payload(opened, which, offsets[present].astype(np.int64), lengths[present].astype(np.int64))
    payload.shards = [digest for digest, file in zip(asked.shards, files, strict=True) if file is not None]
    return statuses, payload


def _read_from(asked: ReadRequest) -> list[Digest | None]:
    """Return the shards that a range is of; ``None`` for the others, which need no open file however many are named."""
    read_from = set(asked.ranges["shard"].tolist())
    return [digest if at in read_from else None for at, digest in enumerate(asked.shards)]


def _open_all(node: Node, digests: Sequence[Digest | None]) -> list[OpenFile | None]:
    files: list[OpenFile | None] = []
    for digest in digests:
        try:
            files.append(node.store.open_file(Kind.SHARD, digest) if digest is not None else None)
        except (NotFound, DiskFailed):
            files.append(None)
    return files


async def respond(
    request: web.Request, node: Node, headers: dict[str, str], first: bytes, payload: Payload | None
) -> web.StreamResponse:
    """Answer with ``first`` and the payload behind it, which ``headers`` announce.

    What fails once the head is sent can only cut the connection: an error answer would be taken for what was promised.
    """
    response = web.StreamResponse(headers=headers)
    transport = request.transport
    if transport is None:
        return response  # the reader is gone, as the server finds when it starts to send
    transport.set_write_buffer_limits(0)  # what is drained has left the process: the rest goes past the transport
    try:
        async with asyncio.timeout(SEND_SECONDS_MAX):
            writer = await response.prepare(request)
            assert writer is not None
            if first:
                await writer.write(first)
            await writer.drain()
        if payload is not None and payload.size_bytes:
            with Line(transport) as line:
                await _send(line, node, payload, client_of(request))
    except (OSError, QuiverError) as error:
        if cut_off(error) and payload is not None:
            node.suspect(payload.shards)  # or every reader of them would be cut off
        transport.abort()
        response.force_close()
        return response  # an error raised here would be logged once more, with a traceback for each reader who goes
    await response.write_eof()
    return response


async def _send(line: Line, node: Node, payload: Payload, client: str) -> None:
    taking = Taking(node, payload)
    while not payload.done:
        await node.sending.take(client, SEND_SECONDS_MAX)  # one that takes its answers slowly takes up threads as well
        try:
            count, slow = await line.push(payload, node.send_threads)
        finally:
            node.sending.end(client)
        seconds = taking.took(count)
        if slow:
            async with asyncio.timeout(seconds):
                await line.writable()


class Taking:
    """How a reader takes an answer: what he took is counted, and what he leaves is waited for, though not for ever.

    One who takes a little now and then would otherwise hold one of the reads that may be under way for as long as he
    likes. So whatever was sent, it took no longer than it takes at the rate at which readers themselves give up.
    """

    def __init__(self, node: Node, payload: Payload) -> None:
        self._counters = node.counters
        self._payload = payload
        self._head_bytes = len(payload.head)  # which are not counted
        self._until = time.monotonic() + SEND_SECONDS_MAX

    def took(self, count: int) -> float:
        """Count it; return for how many seconds more he is waited for. Raises ``TimeoutError`` if that is none."""
        of_head = min(count, self._head_bytes)
        self._head_bytes -= of_head
        self._counters.add("served_bytes", count - of_head)
        self._until += count / SLOWEST_BYTES_PER_SECOND
        left = self._until - time.monotonic()
        if left <= 0 and not self._payload.done:
            raise TimeoutError("the reader takes it too slowly")
        return min(left, SEND_SECONDS_MAX)


def cut_off(error: OSError | QuiverError) -> bool:
    """Log why an answer ends early; return whether its shards are to be verified again."""
    gone = isinstance(error, ConnectionError)  # a reader who ended, of which there may be thousands, and no fault here
    level = logging.DEBUG if gone else logging.WARNING
    log.log(level, "an answer was cut off: %s", str(error) or "the reader does not take it")
    return isinstance(error, DiskFailed)
