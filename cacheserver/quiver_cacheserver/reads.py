"""``POST /v1/read``: all that one reader wants of this daemon for a batch, in one answer.

Shards that are missing are brought in while the reader waits, as long as it said it would; the rest is answered by
status. File reads happen in threads, a block at a time, and the next block is read while the last one is sent: so
memory is two blocks a request, and a cold disk holds nobody else up.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Final

import numpy as np
import numpy.typing as npt
from aiohttp import web

from quiver.digest import Digest
from quiver.errors import BadRequest, DiskFailed, NotFound, OverCapacity, QuiverError
from quiver.store import Kind, OpenFile
from quiver.wire import (
    FORGO,
    READ_REQUEST_BYTES_MAX,
    READ_TYPE,
    RECHECK,
    RangeStatus,
    ReadRequest,
)
from quiver_cacheserver.fills import UPLOADS_A_READER
from quiver_cacheserver.node import Node

log = logging.getLogger(__name__)

BLOCK_BYTES: Final = 4 << 20
READS_AT_ONCE: Final = 128
BODY_SECONDS_MAX: Final = 10.0
SEND_SECONDS_MAX: Final = 60.0  # a reader that does not take a block in that time is gone

Ranges = list[tuple[OpenFile, int, int]]  # file, offset, length


async def read(request: web.Request, node: Node) -> web.StreamResponse:
    """Answer one batched read."""
    if node.counters.reads_in_flight >= READS_AT_ONCE:
        node.counters.overloads += 1
        raise OverCapacity(f"{READS_AT_ONCE} reads are under way", 1.0)
    node.counters.reads_in_flight += 1
    try:
        asked = ReadRequest.decode(await body_of(request, READ_REQUEST_BYTES_MAX))
        statuses, ranges = await _gather(node, asked)
        return await _answer(request, node, statuses, ranges)
    finally:
        node.counters.reads_in_flight -= 1


async def body_of(request: web.Request, limit_bytes: int) -> bytes:
    """Return a small request's body. Raises ``BadRequest`` if it is too large or too slow."""
    if request.content_length is None or request.content_length > limit_bytes:
        raise BadRequest(f"a body with a Content-Length of at most {limit_bytes} is wanted")
    try:
        async with asyncio.timeout(BODY_SECONDS_MAX):
            return await request.content.readexactly(request.content_length)
    except (TimeoutError, ConnectionError, asyncio.IncompleteReadError) as error:
        raise BadRequest("the body did not arrive") from error


async def _gather(node: Node, asked: ReadRequest) -> tuple[npt.NDArray[np.uint8], Ranges]:
    """Return a status per range, and the ranges to send."""
    manifest = await node.manifests.get(asked.manifest) if asked.manifest is not None else None
    wanted = asked.shards
    if asked.flags & RECHECK:
        node.suspect(wanted)
    if asked.flags & FORGO:
        for digest in wanted:
            node.fills.forgo(digest)
    await node.bring(wanted, manifest, asked.wait_ms / 1000)
    loop = asyncio.get_running_loop()
    numbers = asked.ranges["shard"]
    read_from = set(numbers.tolist())
    here = [digest if at in read_from and node.resident(digest) else None for at, digest in enumerate(wanted)]
    files = await loop.run_in_executor(node.disk_threads, _open_all, node, here)

    absent: list[RangeStatus] = []
    for digest, tried, file in zip(wanted, here, files, strict=True):
        if file is not None:
            absent.append(RangeStatus.PRESENT)
        elif tried is not None and node.resident(digest):
            absent.append(RangeStatus.FAILED)  # it is here, and the disk does not give it out
        else:
            choose = absent.count(RangeStatus.UPLOAD) < UPLOADS_A_READER
            absent.append(node.absence(digest, manifest, choose=choose))
    statuses = np.asarray(absent, np.uint8)[numbers] if len(wanted) else np.zeros(0, np.uint8)
    sizes = np.asarray([f.size_bytes if f else 0 for f in files], np.uint64)[numbers] if len(wanted) else statuses
    offsets, lengths = asked.ranges["offset"], asked.ranges["length"]
    outside = (offsets > sizes) | (lengths > sizes) | (offsets > sizes - np.minimum(lengths, sizes))
    statuses[(statuses == RangeStatus.PRESENT) & outside] = RangeStatus.BAD_RANGE
    ranges: Ranges = []
    for at in np.flatnonzero(statuses == RangeStatus.PRESENT).tolist():
        file = files[int(numbers[at])]
        assert file is not None
        ranges.append((file, int(offsets[at]), int(lengths[at])))
    for status in RangeStatus:
        count = int((statuses == status).sum())
        if count:
            node.counters.count("ranges", status.name.lower(), count)
    return statuses, ranges


def _open_all(node: Node, digests: list[Digest | None]) -> list[OpenFile | None]:
    files: list[OpenFile | None] = []
    for digest in digests:
        try:
            files.append(node.store.open_file(Kind.SHARD, digest) if digest is not None else None)
        except (NotFound, DiskFailed):
            files.append(None)
    return files


async def _answer(
    request: web.Request, node: Node, statuses: npt.NDArray[np.uint8], ranges: Ranges
) -> web.StreamResponse:
    total = sum(length for _, _, length in ranges)
    response = web.StreamResponse(headers={"Content-Type": READ_TYPE, "Content-Length": str(len(statuses) + total)})
    await response.prepare(request)
    await response.write(statuses.tobytes())
    await send_ranges(request, response, node, ranges)
    await response.write_eof()
    return response


async def send_ranges(request: web.Request, response: web.StreamResponse, node: Node, ranges: Ranges) -> None:
    """Send ranges of files under a head that was sent. What fails from here on can only cut the connection.

    An error answer now would be taken for the bytes that were promised.
    """
    try:
        await _send_blocks(response, node, ranges)
    except (QuiverError, TimeoutError) as error:
        log.warning("an answer was cut off: %s", error or "the reader does not take it")
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("cut off") from error


async def _send_blocks(response: web.StreamResponse, node: Node, ranges: Ranges) -> None:
    """Read the next block while the last one is sent."""
    loop = asyncio.get_running_loop()
    blocks = _blocks(ranges)
    coming = loop.run_in_executor(node.disk_threads, _read_block, blocks[0]) if blocks else None
    for following in [*blocks[1:], None]:
        if coming is None:
            break
        block = await coming
        coming = loop.run_in_executor(node.disk_threads, _read_block, following) if following else None
        async with asyncio.timeout(SEND_SECONDS_MAX):
            await response.write(block)
        node.counters.served_bytes += len(block)


def _blocks(ranges: Ranges) -> list[Ranges]:
    """Cut ranges into blocks of at most ``BLOCK_BYTES``; a longer range is cut as well."""
    blocks: list[Ranges] = []
    room = 0
    for file, start, size in ranges:
        offset, length = start, size
        while length:
            if not room:
                blocks.append([])
                room = BLOCK_BYTES
            take = min(length, room)
            blocks[-1].append((file, offset, take))
            offset, length, room = offset + take, length - take, room - take
    return blocks


def _read_block(block: Ranges) -> memoryview:
    data = np.empty(sum(length for _, _, length in block), np.uint8).data
    at = 0
    for file, offset, length in block:
        try:
            count = os.preadv(file.fd, [data[at : at + length]], offset)
        except OSError as error:
            raise DiskFailed(f"a shard file cannot be read: {error.strerror}") from error
        if count != length:
            raise DiskFailed("a shard file became shorter")  # the reader sees a short answer and asks elsewhere
        at += length
    return data
