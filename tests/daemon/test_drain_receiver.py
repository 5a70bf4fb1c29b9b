"""What a daemon takes of what another one hands over: by need, into its own room, and verified."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.digest import Bytes, Digest
from quiver.errors import Corrupt, DiskFailed, NotFound, QuiverError
from quiver.handover import HandoverRequest, Taken
from quiver.manifest import Manifest
from quiver.residency import ConsumerReport
from quiver.residency.commitments import Recipe
from quiver_cacheserver.node import Node
from tests.daemon.test_costs import SHARD_BYTES, lone_node
from tests.daemon.test_rooms import even, resident
from tests.support.data import Files, shard_bytes_of

__all__ = ["even"]


class Giver:
    """In place of the client of a draining daemon."""

    name, url = "peer http://giver:1", "http://giver:1"

    def __init__(self, load: Callable[[Digest], Bytes]) -> None:
        self._load = load

    def load(self, digest: Digest, size_bytes: int) -> Bytes:
        return self._load(digest)

    def fault(self, digest: Digest, error: Corrupt) -> QuiverError:
        return error


@pytest.fixture
def node(even: Files, tmp_path: Path) -> Iterator[Node]:
    """A daemon with room for four shards, full of the first four."""
    made = lone_node(even, tmp_path, 4 * SHARD_BYTES + 1000)
    manifest = even.opened()
    for number in range(4):
        made.filler.fill(manifest.shard_digest(number), manifest)
    yield made
    made.close()


def given_by(node: Node, monkeypatch: pytest.MonkeyPatch, load: Callable[[Digest], Bytes]) -> None:
    monkeypatch.setattr(node.peers, "member", lambda name, domain: Giver(load) if name == "giver" else None)


def content_of(files: Files) -> Callable[[Digest], Bytes]:
    manifest = files.opened()
    return lambda digest: shard_bytes_of(manifest, manifest.shard_numbers[digest])[1]


def reported(node: Node, manifest: Manifest, *consumers: set[int]) -> None:
    """Have consumers report which shards they need."""
    needs: Any = node._needs
    held = np.asarray([node.held(manifest.shard_digest(number)) for number in range(manifest.shard_count)])
    every = np.ones(manifest.shard_count, bool)
    sizes = manifest.tables.shard_sizes.astype(np.float64)
    needs.add_dataset(manifest.digest, manifest.tables.shard_digests, sizes, held, every)
    for at, needed in enumerate(consumers):
        left = np.zeros(manifest.shard_count, np.uint8)
        left[sorted(needed)] = 255
        assert needs.report(manifest.digest, ConsumerReport(bytes([at + 1]) * 16, left, 0.0, 0.0, 1e9), 0.0)


async def offered(node: Node, manifest: Manifest, *numbers: int, wait_ms: int = 30_000, **more: Any) -> list[Taken]:
    shards = tuple(manifest.shard_digest(number) for number in numbers)
    sizes = tuple(int(manifest.tables.shard_sizes[number]) for number in numbers)
    request = HandoverRequest("giver", shards, sizes, take=True, wait_ms=wait_ms, **more)
    return [Taken(it) for it in (await node.receiver.answer(request, "10.0.0.9", trusted=True)).shards]


async def test_a_shard_that_two_need_replaces_one_that_one_needs_and_no_equal_one_does(
    even: Files, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = even.opened()
    given_by(node, monkeypatch, content_of(even))
    reported(node, manifest, {0, 1, 2, 3, 4, 5}, {4, 0})
    assert await offered(node, manifest, 0, 4, 5, 6) == [Taken.HELD, Taken.TAKEN, Taken.NO_ROOM, Taken.NO_ROOM]
    assert {0, 4} < resident(node, manifest), "0 is needed by two as well"
    assert len(resident(node, manifest)) == 4
    assert node.counters.forced_drops == 1
    assert not len(node._needs.commitments)
    assert node.counters.fills["peer"] == 1


async def test_a_pinned_dataset_makes_no_room(even: Files, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = even.opened()
    given_by(node, monkeypatch, content_of(even))
    reported(node, manifest, {4})
    monkeypatch.setattr(node.pins, "among", lambda shards: np.ones(len(shards), bool))
    assert await offered(node, manifest, 4) == [Taken.NO_ROOM]
    assert resident(node, manifest) == {0, 1, 2, 3}


async def test_a_disk_that_takes_no_files_has_no_room_so_that_another_member_is_asked_at_once(
    even: Files, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, asked = even.opened(), []
    given_by(node, monkeypatch, lambda digest: asked.append(digest) or content_of(even)(digest))
    reported(node, manifest, {4})

    def full(*_: object) -> None:
        raise DiskFailed("the disk is full")

    monkeypatch.setattr(node.store, "reserve", full)
    assert await offered(node, manifest, 4) == [Taken.NO_ROOM]
    assert await offered(node, manifest, 4) == [Taken.NO_ROOM]
    assert len(asked) == 1, "nothing is fetched for a disk that is known to take nothing"
    assert not len(node._needs.commitments)


@pytest.mark.parametrize("wrong", ["flipped", "short", "gone", "unknown giver"])
async def test_what_is_not_delivered_right_evicts_nothing(
    even: Files, node: Node, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    manifest, content = even.opened(), content_of(even)

    def load(digest: Digest) -> Bytes:
        if wrong == "gone":
            raise NotFound("the shard is not resident")
        data = bytearray(content(digest))
        data[7] ^= 1
        return bytes(data if wrong == "flipped" else data[:-9])

    given_by(node, monkeypatch, load)
    if wrong == "unknown giver":
        monkeypatch.setattr(node.peers, "member", lambda name, domain: None)
    reported(node, manifest, {4})
    assert await offered(node, manifest, 4) == [Taken.GONE if wrong == "gone" else Taken.FAILED]
    assert resident(node, manifest) == {0, 1, 2, 3}
    assert node.inventory.reserved_bytes() == 0
    assert not len(node._needs.commitments)


async def test_a_slow_giver_is_waited_for_as_long_as_the_request_says_and_fetched_from_once(
    even: Files, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, content = even.opened(), content_of(even)
    go, asked = threading.Event(), []

    def load(digest: Digest) -> Bytes:
        asked.append(digest)
        go.wait(30)
        return content(digest)

    given_by(node, monkeypatch, load)
    reported(node, manifest, {4})
    assert await offered(node, manifest, 4, wait_ms=1) == [Taken.PENDING]
    assert Recipe(manifest.shard_digest(4), manifest.digest) in node._needs.commitments, "the policy sees it coming"
    assert await offered(node, manifest, 4, wait_ms=1) == [Taken.PENDING]
    go.set()
    assert await offered(node, manifest, 4) in ([Taken.TAKEN], [Taken.HELD])
    assert len(asked) == 1
    assert 4 in resident(node, manifest)


async def test_a_shard_is_kept_on_the_account_that_a_trusted_giver_names(
    even: Files, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = even.opened()
    given_by(node, monkeypatch, content_of(even))
    reported(node, manifest, {4, 5})
    await offered(node, manifest, 4, 5, holders=("10.0.0.7",), holder_of=(1, 0))
    whose = node.holders.of([manifest.shard_digest(4), manifest.shard_digest(5)]).tolist()
    assert whose == [node.holders.number("10.0.0.7"), 0]


async def test_nothing_is_fetched_for_a_request_that_only_asks(
    even: Files, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = even.opened()
    given_by(node, monkeypatch, content_of(even))
    request = HandoverRequest("giver", tuple(manifest.shard_digest(number) for number in (0, 5)))
    answer = await asyncio.wait_for(node.receiver.answer(request, "10.0.0.9"), 20)
    assert list(answer.shards) == [Taken.HELD, Taken.ABSENT]
    assert resident(node, manifest) == {0, 1, 2, 3}
