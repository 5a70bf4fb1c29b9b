"""What a tier may put: a sample that would end past its buffer has not come, and is asked for elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from quiver.plan import plan_batch
from quiver_client.batch import Batch
from quiver_client.buffers import Buffer
from tests.support.data import Files


@pytest.fixture
def batch(files: Files) -> Batch:
    """Of the first samples of one shard."""
    manifest = files.opened()
    rows = np.flatnonzero(plan_batch(manifest, np.arange(len(manifest))).shards == 0)[:3]
    return Batch(plan_batch(manifest, rows), "fast")


def test_a_sample_that_ends_past_its_buffer_was_not_put(batch: Batch) -> None:
    size = int(batch.plan.sizes[1])
    for offset, room in ((0, size - 1), (1, size), (-1, size), (2**63 - 1, size)):
        batch.put(np.asarray([1]), Buffer.of(bytes(room)), np.asarray([offset]))
        assert batch.not_received().tolist() == [0, 1, 2]
    batch.put(np.asarray([1]), Buffer.of(bytes(size)), np.asarray([0]))
    assert batch.not_received().tolist() == [0, 2]


def test_a_sample_that_ends_past_its_mapped_shard_was_not_put(batch: Batch, files: Files) -> None:
    plan = batch.plan
    ends = plan.offsets + plan.sizes
    last, before = int(np.argmax(ends)), int(ends.max()) - 1
    everything = np.arange(len(plan))
    batch.put_mapped(everything, {0: Buffer.of(bytes(before))})
    assert batch.not_received().tolist() == [last]
    batch.put_mapped(everything, {0: Buffer.of(bytes(before + 1))})
    assert not len(batch.not_received())
