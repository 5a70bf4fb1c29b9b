"""Decisions are carried out as said: what is evicted for a shard, when, and what becomes of it if the fetch fails."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.digest import Digest
from quiver.domain import SINGLE, domain_named
from quiver.errors import Changed, OverCapacity
from quiver.manifest import Manifest
from quiver.residency import ConsumerReport, Decision
from quiver.store import Kind
from quiver_cacheserver.node import Node
from quiver_cacheserver.pins import pin_of
from tests.daemon.test_costs import HONEST, SHARD_BYTES, age, held, lone_node
from tests.support.data import Files, make_files, random_files

SHARDS = 12


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Twelve shards of one sample each, all of one size."""
    content = random_files(SHARDS, seed=7, low=60_000, high=60_001)
    return make_files(tmp_path_factory.mktemp("even"), content, shard_bytes=61_000)


@pytest.fixture
def node(even: Files, tmp_path: Path) -> Iterator[Node]:
    """A daemon with room for four shards, full of the first four, without a loop."""
    with contextlib.closing(lone_node(even, tmp_path, 4 * SHARD_BYTES + 1000)) as made:
        manifest = even.opened()
        for number in range(4):
            made.filler.fill(manifest.shard_digest(number), manifest)
        yield made


def needed_by(node: Node, manifest: Manifest, *numbers: int) -> None:
    """Have one consumer report that it needs these."""
    needs: Any = node._needs
    sizes = manifest.tables.shard_sizes.astype(np.float64)
    if not needs.has_dataset(manifest.digest):
        every = np.ones(manifest.shard_count, bool)
        needs.add_dataset(manifest.digest, manifest.tables.shard_digests, sizes, ~every, every)
    left = np.zeros(manifest.shard_count, np.uint8)
    left[list(numbers)] = 255
    assert needs.report(manifest.digest, ConsumerReport(bytes(16), left, 0.0, 0.0, 1e9), 0.0)


def resident(node: Node, manifest: Manifest) -> set[int]:
    return {number for number in range(manifest.shard_count) if node.held(manifest.shard_digest(number))}


def decision_of(manifest: Manifest, number: int, *evict: int, forced: bool = False) -> Decision:
    victims = tuple(manifest.shard_digest(at) for at in evict)
    return Decision(
        manifest.shard_digest(number), manifest.digest, float(SHARD_BYTES), victims, victims if forced else ()
    )


def test_what_was_decided_is_evicted_and_nothing_else(even: Files, node: Node) -> None:
    manifest = even.opened()
    needed_by(node, manifest, 0, 1, 2, 3)
    with pytest.raises(OverCapacity):
        node.filler.fill(manifest.shard_digest(4), manifest)
    node._needs.commit(decision_of(manifest, 4, 2, forced=True))
    node.filler.fill(manifest.shard_digest(4), manifest)
    assert resident(node, manifest) == {0, 1, 3, 4}
    assert node.counters.forced_drops == 1


def test_what_somebody_came_to_need_since_the_decision_is_spared(even: Files, node: Node) -> None:
    manifest = even.opened()
    needed_by(node, manifest, 0, 1)
    node._needs.commit(decision_of(manifest, 4, 2))
    needed_by(node, manifest, 0, 1, 2)
    node.filler.fill(manifest.shard_digest(4), manifest)
    assert resident(node, manifest) == {0, 1, 2, 4}, "another one that nobody needs was evicted instead"
    assert node.counters.forced_drops == 0


def pin(node: Node, manifest: Manifest, *numbers: int) -> None:
    """Pin a dataset of these shards."""
    node.pins.add("a" * 16, pin_of("pinned", SHARD_BYTES))
    rows = manifest.tables.shard_digests[list(numbers)]
    node.pins.know("a" * 16, SINGLE, Digest(bytes([7] * 32)), rows)


def test_what_is_pinned_is_evicted_for_nobody(even: Files, node: Node) -> None:
    manifest = even.opened()
    needed_by(node, manifest, 0)
    pin(node, manifest, 1, 2, 3)
    with pytest.raises(OverCapacity):
        node.filler.fill(manifest.shard_digest(4), manifest)
    assert resident(node, manifest) == {0, 1, 2, 3}
    assert node.pins.remove("a" * 16)
    node.filler.fill(manifest.shard_digest(4), manifest)
    assert {0, 4} <= resident(node, manifest)


def test_what_was_pinned_since_the_decision_is_spared(even: Files, node: Node) -> None:
    manifest = even.opened()
    needed_by(node, manifest, 0, 1)
    node._needs.commit(decision_of(manifest, 4, 2, forced=True))
    pin(node, manifest, 2)
    node.filler.fill(manifest.shard_digest(4), manifest)
    assert resident(node, manifest) == {0, 1, 2, 4}


def test_a_fetch_that_fails_has_evicted_nothing_and_its_victims_are_held_as_before(even: Files, node: Node) -> None:
    manifest = even.opened()
    needed_by(node, manifest, 0, 1, 2, 3)
    gone = make_files(
        even.folder.parent, random_files(2, seed=8, low=60_000, high=60_001), name="gone", shard_bytes=61_000
    )
    for path in gone.folder.rglob("*.png"):
        path.unlink()
    there = gone.opened()
    decision = decision_of(there, 0)._replace(evict=(manifest.shard_digest(3),), forced=(manifest.shard_digest(3),))
    node._needs.commit(decision)
    with pytest.raises(Changed):
        node.filler.fill(there.shard_digest(0), there)
    assert resident(node, manifest) == {0, 1, 2, 3}
    assert node._needs.commitments.evicting == [manifest.shard_digest(3)]
    node._needs.end(decision.recipe)
    assert node._needs.commitments.evicting == []


def test_what_is_evicted_for_one_shard_gives_room_to_no_other(even: Files, node: Node) -> None:
    manifest = even.opened()
    needed_by(node, manifest, 0, 1, 2)  # nobody needs 3
    node._needs.commit(decision_of(manifest, 4, 3))
    assert node.rooms.free_bytes() < SHARD_BYTES
    with pytest.raises(OverCapacity):
        node.filler.fill(manifest.shard_digest(5), manifest, HONEST)
    node._needs.end(decision_of(manifest, 4).recipe)
    node.filler.fill(manifest.shard_digest(5), manifest, HONEST)
    assert resident(node, manifest) == {0, 1, 2, 5}


def test_room_that_is_promised_to_what_is_coming_is_not_free(even: Files, node: Node) -> None:
    manifest = even.opened()
    needed_by(node, manifest, 0, 1, 2)
    node.store.drop(Kind.SHARD, manifest.shard_digest(3))
    free_bytes = node.rooms.free_bytes()
    node._needs.commit(decision_of(manifest, 4))
    assert node.rooms.free_bytes() == free_bytes - SHARD_BYTES, "a second decision must not count on it"
    with node.rooms.reserve(Kind.SHARD, manifest.shard_digest(4), SHARD_BYTES):
        assert node.rooms.free_bytes() == free_bytes - SHARD_BYTES, "what is reserved was promised"
    node._needs.end(decision_of(manifest, 4).recipe)
    assert node.rooms.free_bytes() == free_bytes


def test_a_decision_whose_room_came_free_meanwhile_evicts_nothing(even: Files, node: Node) -> None:
    manifest = even.opened()
    needed_by(node, manifest, 0, 1)
    node._needs.commit(decision_of(manifest, 4, 2))
    node.store.drop(Kind.SHARD, manifest.shard_digest(3))
    node.filler.fill(manifest.shard_digest(4), manifest)
    assert resident(node, manifest) == {0, 1, 2, 4}


def test_an_upload_takes_the_place_of_what_was_decided_for_it(even: Files, node: Node) -> None:
    manifest = even.opened()
    needed_by(node, manifest, 0, 1, 2, 3)
    age(node, 3600.0)
    data = bytes(SHARD_BYTES)
    with pytest.raises(OverCapacity), node.rooms.reserve(Kind.SHARD, Digest.of(data), len(data), HONEST):
        pass
    node._needs.commit(Decision(Digest.of(data), manifest.digest, SHARD_BYTES, (manifest.shard_digest(1),)))
    needed_by(node, manifest, 0, 2, 3)
    with node.rooms.reserve(Kind.SHARD, Digest.of(data), len(data), HONEST) as writing:
        writing.write(data)
        writing.commit()
    assert held(node, manifest) == 3
    assert resident(node, manifest) == {0, 2, 3}


def test_what_a_decision_evicts_beyond_its_own_shard_is_free_once_it_is_evicted(even: Files, node: Node) -> None:
    manifest = even.opened()
    needed_by(node, manifest, 0, 1, 2, 3)
    free_bytes = node.rooms.free_bytes()
    small = decision_of(manifest, 4, 2, forced=True)._replace(size_bytes=2000.0)
    node._needs.commit(small)
    assert node.rooms.free_bytes() == free_bytes, "another one would find no room before this one has come"
    with node.rooms.reserve(Kind.SHARD, small.shard, 2000):
        assert node.rooms.free_bytes() == free_bytes + SHARD_BYTES - 2000
    node._needs.end(small.recipe)


# -- what readers use that report nothing -----------------------------------------------------------------------------


def read_before(node: Node, manifest: Manifest, *seconds: float) -> None:
    """Have readers read a dataset so many seconds ago, the last time last, and nothing since."""
    opened = node.manifests.opened
    opened.add(manifest.digest, manifest)
    now = time.monotonic()
    opened._pauses[manifest.digest] = deque(np.diff(-np.array(seconds)).tolist())
    opened._used[manifest.digest] = now - seconds[-1]
    age(node, seconds[-1])


@pytest.fixture
def other(even: Files) -> Manifest:
    content = random_files(4, seed=9, low=60_000, high=60_001)
    return make_files(even.folder.parent, content, name="other", shard_bytes=61_000).opened()


@pytest.mark.parametrize(
    ("seconds", "takes"),
    [
        ((4.0,), False),  # the lease of a reader is 5 s
        ((6.0,), True),
        ((9.0, 6.0), False),  # it reads every 3 s, so a pause of 6 s is nothing unusual
        ((9.0, 8.9, 8.8, 8.7), True),
        ((400.0, 50.0), False),
        ((400.0, 61.0), True),  # and nobody waits longer than this
    ],
)
def test_what_nobody_reads_any_more_gives_room_after_a_lease(
    even: Files, other: Manifest, node: Node, seconds: tuple[float, ...], takes: bool
) -> None:
    read_before(node, even.opened(), *seconds)
    if takes:
        node.filler.fill(other.shard_digest(0), other)
        assert len(resident(node, even.opened())) == 3
    else:
        with pytest.raises(OverCapacity):
            node.filler.fill(other.shard_digest(0), other)


def test_readers_of_mapped_files_hold_a_lease_as_well(even: Files, other: Manifest, node: Node) -> None:
    manifest = even.opened()
    read_before(node, manifest, 6.0)
    node.manifests.opened.use_of([manifest.shard_digest(2)])
    with pytest.raises(OverCapacity):
        node.filler.fill(other.shard_digest(0), other)


def test_what_readers_of_another_domain_use_renews_no_lease(even: Files, other: Manifest, node: Node) -> None:
    manifest = even.opened()
    read_before(node, manifest, 6.0)
    node.manifests.opened.use_of([manifest.shard_digest(2)], domain_named("another"))
    node.filler.fill(other.shard_digest(0), other)


def test_what_two_datasets_share_is_in_use_while_one_of_them_is_read(even: Files, other: Manifest, node: Node) -> None:
    manifest = even.opened()
    subset = dict(list(even.content.items())[::2])
    part = make_files(even.folder.parent, subset, name="part", shard_bytes=61_000).opened()
    read_before(node, manifest, 6.0)
    read_before(node, part, 0.0)
    shared = {number for number in range(4) if manifest.shard_digest(number) in part.shard_numbers}
    assert 0 < len(shared) < 4
    for number in range(4):
        with contextlib.suppress(OverCapacity):
            node.filler.fill(other.shard_digest(number), other)
    assert resident(node, manifest) == shared
