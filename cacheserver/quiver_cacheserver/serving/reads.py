"""Batched reads: everything that a reader needs of this daemon for a batch, in one answer.

Missing shards are filled while the reader waits, for as long as its request says; those still missing are answered by
status. ``unpacked``, ``at_hand`` and ``gather`` serve both transports: ``read_route`` is ``POST /v1/read``, the plain
one, and ``streams`` the fast one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from aiohttp import web

from quiver.digest import Bytes, Digest
from quiver.domain import Domain
from quiver.errors import DiskFailed, NotFound
from quiver.store import Kind, OpenFile
from quiver.wire import FORGO, READ_REQUEST_BYTES_MAX, READ_TYPE, RECHECK, RangeStatus, ReadRequest
from quiver_cacheserver.access.caller import Caller
from quiver_cacheserver.access.rights import READ_FILLS, READ_FORGOES, READ_RECHECKS, allows
from quiver_cacheserver.budget import Cost
from quiver_cacheserver.node import Node
from quiver_cacheserver.serving.absence import Absence
from quiver_cacheserver.serving.payload import Ints, Payload
from quiver_cacheserver.serving.requests import body_of, caller_of, read_by, unhurried
from quiver_cacheserver.serving.sender import Sender
from quiver_cacheserver.serving.turns import Places, Turn
from quiver_cacheserver.slices import SLICE

FREE_SHARDS: Final = 4096  # of a request; each further one is charged
SHARD_SECONDS: Final = 10e-6  # the time to unpack one, look it up and answer
PRESENT: Final = int(RangeStatus.PRESENT)  # which is 0
READ_ELSEWHERE: Final = (int(RangeStatus.NO_ROOM), int(RangeStatus.FAILED))  # the others are asked for again
STATUS_NAMES: Final = {int(status): status.name.lower() for status in RangeStatus}


class ReadAnswer(NamedTuple):
    """A status per range, and for those present the file, and offset and length in bytes."""

    statuses: npt.NDArray[np.uint8]
    shards: Sequence[Digest]  # that the files are
    files: Sequence[OpenFile]
    numbers: Ints
    offsets: Ints
    lengths: Ints

    @property
    def size_bytes(self) -> int:
        """The bytes of the ranges that are present."""
        return int(self.lengths.sum())

    def payload(self, head: bytes = b"") -> Payload:
        return Payload(self.files, self.numbers, self.offsets, self.lengths, head, self.shards)


def read_route(node: Node, sender: Sender, reading: Places) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return the handler of ``POST /v1/read``."""

    async def read(request: web.Request) -> web.StreamResponse:
        unhurried(request)
        async with body_of(request, node.budgets, READ_REQUEST_BYTES_MAX) as body:
            with Turn(reading, node.counters, caller_of(request), read_by(request)) as turn:
                async with node.slices.turn() if ReadRequest.shards_named(body) > SLICE else contextlib.nullcontext():
                    asked = unpacked(node, body, turn.client)
                answer = await gather(node, asked, turn)
                size_bytes = len(answer.statuses) + answer.size_bytes
                headers = {"Content-Type": READ_TYPE, "Content-Length": str(size_bytes)}
                return await sender.respond(request, headers, answer.statuses.tobytes(), answer.payload())

    return read


def charge(node: Node, shards: int, client: str) -> None:
    """Charge a client for a request that names so many shards. Raises ``OverCapacity``."""
    over, now = shards - FREE_SHARDS, time.monotonic()
    if over > 0 and not node.budgets.spend(client, Cost.WORK_SECONDS, over * SHARD_SECONDS, now):
        raise node.budgets.refusal(Cost.WORK_SECONDS, client, now)


def unpacked(node: Node, body: Bytes, client: str) -> ReadRequest:
    """Return what a body asks for, charged to its client. Raises ``BadRequest`` and ``OverCapacity``."""
    charge(node, ReadRequest.shards_named(body), client)
    return ReadRequest.decode(body)


def at_hand(node: Node, asked: ReadRequest, turn: Turn) -> ReadAnswer | None:
    """In a thread: answer a read if all its shards are resident and verified; else ``None``: the loop must."""
    if asked.flags or not _all_resident(node, asked, turn.caller.scope):
        return None
    read_from = _read_from(asked)
    turn.hold_files(len(read_from) - read_from.count(None))
    files = _open_all(node, read_from)
    if files.count(None) > read_from.count(None):
        return None
    node.holders.read(asked.shards, turn.client)
    return _counted(node, asked, turn, _answer(node, asked, files, [RangeStatus.PRESENT] * len(files)))


def _all_resident(node: Node, asked: ReadRequest, domain: Domain) -> bool:
    return all(map(node.verification.is_resident, asked.shards, itertools.repeat(domain)))


async def gather(node: Node, asked: ReadRequest, turn: Turn) -> ReadAnswer:
    """Fill what is missing, for as long as the reader waits for it, and answer."""
    wanted, may_fill, domain, sent = asked.shards, allows(turn.caller, READ_FILLS), turn.caller.scope, asked
    if not may_fill:
        asked = replace(asked, manifest=None)  # without which nothing is filled
    if asked.flags & RECHECK and allows(turn.caller, READ_RECHECKS):
        await node.slices.walk(wanted, lambda some: node.suspect(some, turn.client, domain))
    manifest = node.manifests.if_open(asked.manifest, domain)
    listed: Set[Digest] | None = None
    if asked.flags & FORGO or not _all_resident(node, asked, domain):
        async with turn.waiting():
            if manifest is None and asked.manifest is not None:
                manifest = await node.manifests.get(asked.manifest, turn.client, domain)
            known = asked.manifest
            if asked.flags & FORGO and known is not None and allows(turn.caller, READ_FORGOES):
                await node.slices.walk(wanted, lambda some: node.forgo(some, known, turn.client, domain))
            listed = await node.fill_missing(wanted, manifest, asked.wait_ms / 1000, turn.client, domain)
    loop = asyncio.get_running_loop()
    opened = await loop.run_in_executor(node.disk_threads, _open_here, node, asked, turn)
    files = opened[1]
    if listed is None and None in files:  # a shard was evicted meanwhile, or has no range
        listed = await node.listed(wanted, manifest)
    statuses = await _statuses(node, asked, turn.caller, opened, listed or frozenset())
    if not may_fill:  # a manifest would not help this reader
        statuses = [RangeStatus.NO_ROOM if status is RangeStatus.NO_MANIFEST else status for status in statuses]
    await node.slices.walk(wanted, lambda some: node.read_by(turn.client, some, domain))
    if asked.manifest is not None:
        node.read_by(turn.client, [asked.manifest], domain)
    async with node.slices.turn() if len(wanted) > SLICE else contextlib.nullcontext():
        return _counted(node, sent, turn, _answer(node, asked, files, statuses))


def _open_here(node: Node, asked: ReadRequest, turn: Turn) -> tuple[list[Digest | None], list[OpenFile | None]]:
    """In a thread: return the resident shards among those that are read from, and their files."""
    if not len(asked.ranges):
        return [None] * len(asked.shards), [None] * len(asked.shards)
    domain = turn.caller.scope
    here = [digest if digest is not None and node.resident(digest, domain) else None for digest in _read_from(asked)]
    turn.hold_files(len(here) - here.count(None))
    return here, _open_all(node, here)


async def _statuses(
    node: Node,
    asked: ReadRequest,
    caller: Caller,
    opened: tuple[Sequence[Digest | None], Sequence[OpenFile | None]],
    listed: Set[Digest],
) -> list[RangeStatus]:
    """Return the status of each shard. ``opened``: the shards to open, and their files as far as they opened."""
    here, files = opened
    statuses: list[RangeStatus] = []
    absence = Absence(node, listed, asked.manifest, caller)

    def look(some: Sequence[Digest]) -> None:
        for digest in some:
            at = len(statuses)
            if files[at] is not None:
                status = RangeStatus.PRESENT
            elif here[at] is not None and node.resident(digest, caller.scope):
                status = RangeStatus.FAILED  # it is resident, and the disk cannot read it
            else:
                status = absence.status_of(digest)
            statuses.append(status)

    await node.slices.walk(asked.shards, look)
    return statuses


def _answer(
    node: Node, asked: ReadRequest, files: Sequence[OpenFile | None], of_shards: Sequence[RangeStatus]
) -> ReadAnswer:
    """Return the answer: each range has its shard's status, unless it ends past the shard."""
    numbers, offsets, lengths = asked.ranges["shard"], asked.ranges["offset"], asked.ranges["length"]
    statuses = np.asarray([*of_shards, 0], np.uint8)[numbers]
    sizes = np.asarray([*(file.size_bytes if file else 0 for file in files), 0], np.uint64)[numbers]
    outside = (offsets > sizes) | (lengths > sizes) | (offsets > sizes - np.minimum(lengths, sizes))
    statuses[(statuses == PRESENT) & outside] = RangeStatus.BAD_RANGE
    if statuses.any():
        for status, count in enumerate(np.bincount(statuses).tolist()):
            if count:
                node.counters.count("ranges", STATUS_NAMES[status], count)
        present = statuses == PRESENT
        numbers, offsets, lengths = numbers[present], offsets[present], lengths[present]
    elif len(statuses):
        node.counters.count("ranges", STATUS_NAMES[PRESENT], len(statuses))
    opened = [file for file in files if file is not None]
    place = np.cumsum([file is not None for file in files]) - 1
    return ReadAnswer(
        statuses,
        [digest for digest, file in zip(asked.shards, files, strict=True) if file is not None],
        opened,
        place[numbers] if len(files) else np.zeros(0, np.int64),
        offsets.astype(np.int64),
        lengths.astype(np.int64),
    )


def _counted(node: Node, asked: ReadRequest, turn: Turn, answer: ReadAnswer) -> ReadAnswer:
    """Count what was read of the manifest, here or, of what this daemon does not have, elsewhere; not what is retried.

    What only daemons ask of one another is nobody's reading.
    """
    if turn.caller.is_member:
        return answer
    node.count_read(asked.manifest, turn.caller.scope, turn.by.identity.tenant, answer.size_bytes)
    if asked.manifest is not None:
        elsewhere = np.isin(answer.statuses, READ_ELSEWHERE) if answer.statuses.any() else None
        missed = 0 if elsewhere is None else int(asked.ranges["length"][elsewhere].sum())
        node.readers.read(turn.by, asked.manifest, answer.size_bytes + missed, time.monotonic())
    return answer


def _read_from(asked: ReadRequest) -> list[Digest | None]:
    """Return the shards that are read from; ``None`` for the others, which need no open file however many there are."""
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
