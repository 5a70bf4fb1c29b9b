"""A plan against a slow reference that walks the manifest sample by sample."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.manifest import ABSENT, Manifest, write_manifest
from quiver.plan import plan_batch, plan_shards
from tests.kernel.test_manifest import parts_of


@pytest.fixture(scope="module", params=[1, 2, 4])
def manifest(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    path = tmp_path_factory.mktemp("plan") / "m.quiver"
    write_manifest(path, parts_of(5, request.param, samples=60, blobs=40))
    return Manifest.open(path)


def reference(manifest: Manifest, index: int, first: int, last: int) -> tuple[int, int, list[tuple[int, int] | None]]:
    """Return shard, where the fields ``first`` to ``last`` begin in it, and each field's (offset in shard, length)."""
    blob = int(manifest.tables.blob_of[index])
    shard = next(n for n in range(manifest.shard_count) if blob in manifest.shard_blobs(n))
    at = 0
    for before in range(manifest.shard_blobs(shard).start, blob):
        at += sum(int(length) for length in manifest.tables.lengths[before] if length != ABSENT)
    start, cuts = at, []
    for field, length in enumerate(manifest.tables.lengths[blob].tolist()):
        if field == first:
            start = at
        if first <= field <= last:
            cuts.append(None if length == ABSENT else (at, length))
        at += 0 if length == ABSENT else length
    return shard, start, cuts


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 59), min_size=1, max_size=30), st.data())
def test_a_plan_says_what_the_reference_says(manifest: Manifest, indices: list[int], draw: st.DataObject) -> None:
    width = len(manifest.header.blobs)
    first = draw.draw(st.integers(0, width - 1))
    last = draw.draw(st.integers(first, width - 1))
    plan = plan_batch(manifest, np.array(indices), (first, last))
    assert len(plan) == len(indices)
    for at, index in enumerate(indices):
        shard, start, cuts = reference(manifest, index, first, last)
        assert plan.shards[at] == shard
        assert plan.offsets[at] == start
        assert plan.sizes[at] == sum(cut[1] for cut in cuts if cut)
        starts, lengths = plan.starts[at].tolist(), plan.lengths[at].tolist()
        got = [None if length < 0 else (start + begin, length) for begin, length in zip(starts, lengths, strict=True)]
        assert got == cuts
    some = np.array(sorted(draw.draw(st.sets(st.integers(0, len(indices) - 1)))), np.intp)
    assert plan.take(some).offsets.tolist() == plan.offsets[some].tolist()
    for positions in (some, np.arange(len(indices))):
        shards, which = plan.by_shard(positions)
        assert shards.tolist() == sorted(set(plan.shards[positions].tolist()))
        assert shards[which].tolist() == plan.shards[positions].tolist()


def test_a_plan_of_nothing_is_empty(manifest: Manifest) -> None:
    assert len(plan_batch(manifest, np.empty(0, np.intp))) == 0


def test_a_plan_to_bring_shards_reads_no_byte(manifest: Manifest) -> None:
    plan = plan_shards(manifest, np.arange(manifest.shard_count))
    assert plan.shards.tolist() == list(range(manifest.shard_count))
    assert plan.sizes.sum() == 0
