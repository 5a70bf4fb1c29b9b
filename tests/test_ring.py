"""Which member owns which shard. ``tests/golden/ring.json`` pins it: a change there moves every shard of every rack.

To rewrite the vectors, on purpose: ``python -m tests.test_ring``.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import blake3
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.digest import Digest
from quiver.errors import BadRequest
from quiver.ring import MEMBERS_MAX, Member, Ring, check_member, check_url, xxh3_of_words

GOLDEN = Path(__file__).parent / "golden" / "ring.json"
VECTORS_MIN = 200


def members(*weights: float) -> list[Member]:
    return [Member(f"node{i}", f"http://node{i}:7717", weight) for i, weight in enumerate(weights)]


def digests(count: int, seed: str = "shard") -> npt.NDArray[np.uint8]:
    raw = blake3.blake3(seed.encode()).digest(length=32 * count)
    return np.frombuffer(raw, np.uint8).reshape(count, 32)


def first(ring: Ring, shards: npt.NDArray[np.uint8]) -> list[str]:
    return [ring.members[i].id for i in ring.rank(shards, 1)[:, 0]]


# Golden vectors ------------------------------------------------------------------------------------------------------

RACKS = {
    "one": Ring.of("r", members(1.0)),
    "three alike": Ring.of("r", members(1.0, 1.0, 1.0), replicas=2),
    "weights": Ring.of("r", members(1e12, 2e12, 4e12, 0.5e12), replicas=3),
    "one drains": Ring.of("r", [*members(1.0, 1.0, 1.0), Member("z", "http://z:1", 9.0, "draining")], replicas=2),
    "thirty": Ring.of("r", members(*[2e11] * 30), replicas=3),
    "names": Ring.of("r", [Member(name, "http://h:1") for name in ("a", "A", "a.b", "a-b", "a_b", "9", "x" * 64)], 2),
}


def reference_owners(ring: Ring, digest: Digest) -> list[str]:
    """Weighted rendezvous hashing as in the papers, with the xxhash library: slow and independent of our code."""

    def draw(member: Member) -> float:
        seed = xxhash.xxh3_64_intdigest(member.id.encode())
        return -math.log((xxhash.xxh3_64_intdigest(digest[:8], seed) + 0.5) / 2**64) / member.weight

    up = [member for member in ring.members if member.state == "up"]
    return [member.id for member in sorted(up, key=draw)[: ring.replicas]]


def vectors() -> list[dict[str, Any]]:
    """Compute the content of the golden file."""
    return [
        {
            "rack": name,
            "members": [[member.id, member.weight, member.state] for member in ring.members],
            "replicas": ring.replicas,
            "owners": {str(digest): reference_owners(ring, digest) for digest in map(Digest, shards)},
        }
        for name, ring in RACKS.items()
        for shards in [[bytes(32), b"\xff" * 32, *(bytes(row) for row in digests(48, name))]]
    ]


def test_the_owners_of_the_golden_vectors_have_not_moved() -> None:
    golden = json.loads(GOLDEN.read_bytes())
    checked = 0
    for rack in golden:
        found = [Member(name, f"http://{name}:1", weight, state) for name, weight, state in rack["members"]]
        ring = Ring.of("other", reversed(found), rack["replicas"])
        for digest, owners in rack["owners"].items():
            assert [member.id for member in ring.owners(Digest.parse(digest))] == owners, digest
            checked += 1
    assert checked >= VECTORS_MIN
    assert [rack["rack"] for rack in golden] == list(RACKS), "a rack is missing from the golden file"


# The hash ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(min_size=8, max_size=8), min_size=1, max_size=20), st.integers(0, 2**64 - 1))
def test_the_hash_of_words_is_xxh3(words: list[bytes], seed: int) -> None:
    array = np.frombuffer(b"".join(words), "<u8")
    expected = [[xxhash.xxh3_64_intdigest(word, each) for word in words] for each in (seed, 0)]
    assert xxh3_of_words(array, [seed, 0]).tolist() == expected


# Placement -----------------------------------------------------------------------------------------------------------

WEIGHTS = st.lists(st.floats(0.01, 1e13), min_size=1, max_size=12)
SHARDS = st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=12)


@given(WEIGHTS, SHARDS, st.integers(1, 14))
def test_all_shards_at_once_and_one_by_one_agree(weights: list[float], shards: list[bytes], n: int) -> None:
    ring = Ring.of("r", members(*weights))
    ranked = ring.rank(np.frombuffer(b"".join(shards), np.uint8).reshape(-1, 32), n)
    assert ranked.shape == (len(shards), n)
    for row, shard in zip(ranked, shards, strict=True):
        assert [ring.members[i] for i in row if i >= 0] == list(ring.owners(Digest(shard), n))
        assert (row[len(weights) :] == -1).all()


@given(WEIGHTS, SHARDS, st.randoms())
def test_the_order_of_the_members_does_not_matter(weights: list[float], shards: list[bytes], random: Any) -> None:
    given_members = members(*weights)
    ring = Ring.of("r", given_members)
    random.shuffle(given_members)
    other = Ring.of("r", given_members)
    assert ring == other
    for shard in shards:
        assert ring.owners(Digest(shard), 3) == other.owners(Digest(shard), 3)


@given(WEIGHTS, st.floats(0.01, 1e13))
def test_after_a_join_only_the_new_member_takes_and_the_previous_owner_is_runner_up(
    weights: list[float], weight: float
) -> None:
    shards = digests(300)
    before = Ring.of("r", members(*weights))
    after = Ring.of("r", [*before.members, Member("new", "http://new:1", weight)])
    was, now = first(before, shards), after.rank(shards, 2)
    for old, (best, runner_up) in zip(was, now, strict=True):
        best_id = after.members[best].id
        assert best_id in (old, "new")
        if best_id == "new":
            assert after.members[runner_up].id == old


@given(WEIGHTS.filter(lambda weights: len(weights) > 1), st.data())
def test_after_a_leave_only_the_shards_of_that_member_move(weights: list[float], data: st.DataObject) -> None:
    shards = digests(300)
    before = Ring.of("r", members(*weights))
    left = data.draw(st.sampled_from(before.members))
    after = Ring.of("r", [member for member in before.members if member != left])
    for old, new in zip(first(before, shards), first(after, shards), strict=True):
        assert old in (new, left.id)


@pytest.mark.parametrize("count", [3, 10, 30])
def test_a_join_moves_one_nth(count: int) -> None:
    shards = digests(40_000)
    before = Ring.of("r", members(*[1e12] * (count - 1)))
    after = Ring.of("r", [*before.members, Member("new", "http://new:1", 1e12)])
    moved = float(np.mean([a != b for a, b in zip(first(before, shards), first(after, shards), strict=True)]))
    assert moved == pytest.approx(1 / count, rel=0.08)


@given(WEIGHTS, SHARDS)
def test_owners_are_those_of_the_reference_implementation(weights: list[float], shards: list[bytes]) -> None:
    ring = Ring.of("r", members(*weights), replicas=3)
    for digest in map(Digest, shards):
        assert [member.id for member in ring.owners(digest)] == reference_owners(ring, digest)


def test_shards_are_spread_as_the_weights_are() -> None:
    weights = (1e12, 2e12, 3e12, 0.5e12)
    owners, counts = np.unique(first(Ring.of("r", members(*weights)), digests(60_000)), return_counts=True)
    assert owners.tolist() == [f"node{i}" for i in range(4)]
    assert counts / 60_000 == pytest.approx(np.array(weights) / sum(weights), rel=0.05)


@given(WEIGHTS, SHARDS, st.data())
def test_a_draining_member_owns_nothing_and_only_its_shards_move(
    weights: list[float], shards: list[bytes], data: Any
) -> None:
    ring = Ring.of("r", members(*weights))
    drained = data.draw(st.sampled_from(ring.members))
    without = [member for member in ring.members if member != drained]
    draining = Ring.of("r", [*without, msgspec.structs.replace(drained, state="draining")])
    for shard in shards:
        owners = draining.owners(Digest(shard), len(weights))
        assert drained.id not in [member.id for member in owners]
        assert owners == Ring.of("r", without).owners(Digest(shard), len(weights))


@settings(max_examples=30)
@given(st.integers(0, 4), st.integers(0, 4))
def test_owners_are_as_many_as_asked_for_or_as_there_are(count: int, replicas: int) -> None:
    ring = Ring.of("r", members(*[1.0] * count), replicas)
    digest = Digest(bytes(32))
    assert len(ring.owners(digest)) == min(count, replicas)
    assert len(ring.owners(digest, 2)) == min(count, 2)
    assert len({member.id for member in ring.owners(digest, 9)}) == count


def test_a_ring_without_shards_or_members_ranks_nothing() -> None:
    assert Ring.of("r", []).rank(digests(2), 2).tolist() == [[-1, -1], [-1, -1]]
    assert Ring.of("r", members(1.0)).rank(digests(0), 2).shape == (0, 2)


# Invalid rings -------------------------------------------------------------------------------------------------------


def test_a_ring_with_two_members_of_one_id_or_too_many_is_refused() -> None:
    with pytest.raises(BadRequest, match="same id"):
        Ring.of("r", members(1.0) * 2)
    with pytest.raises(BadRequest, match="larger than"):
        Ring.of("r", members(*[1.0] * (MEMBERS_MAX + 1)))
    with pytest.raises(BadRequest, match="9 replicas"):
        Ring.of("r", members(1.0), 9)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), 2.0**60])
def test_a_weight_that_is_not_a_capacity_is_refused(weight: float) -> None:
    with pytest.raises(BadRequest, match="is not a capacity"):
        check_member(Member("a", "http://a:1", weight))


@pytest.mark.parametrize("url", ["", "a:1", "ftp://a:1", "http://", "http://a:0", "http://a:1/x", "http://u:p@a:1"])
def test_a_url_that_is_not_a_daemon_s_is_refused(url: str) -> None:
    with pytest.raises(BadRequest, match="not the URL of a daemon"):
        check_url(url)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(vectors(), indent=1) + "\n")
