"""A file that the origin lost costs its own sample: the others of its shard are cached, and it is mended alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from quiver.errors import Changed, QuiverError
from quiver.manifest import Manifest
from quiver_client import Dataset
from quiver_client.embedded import fill_failures
from tests.support.data import Files, make_files, random_files, rebased
from tests.support.servers import CountingOrigin, counting_origin

Make = Callable[..., Dataset]


@pytest.fixture
def own(tmp_path: Path) -> Files:
    return make_files(tmp_path, random_files(60, seed=11), shard_bytes="128KiB")


@pytest.fixture
def origin(own: Files) -> Iterator[CountingOrigin]:
    with counting_origin(own.folder) as made:
        yield made


def rows_of(manifest: Manifest, shard: int) -> list[int]:
    """Return the samples of a shard."""
    blobs = manifest.shard_blobs(shard)
    of = manifest.tables.blob_of
    return np.flatnonzero((of >= blobs.start) & (of < blobs.stop)).tolist()  # type: ignore[no-any-return]


LOSSES: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "changed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "shorter": lambda path: path.write_bytes(path.read_bytes()[:-1]),
}


@pytest.mark.parametrize(
    ("how", "verify"), [("gone", "fast"), ("changed", "fast"), ("shorter", "full"), ("gone", "off")]
)
def test_the_other_samples_of_a_shard_are_cached_though_one_is_lost(
    dataset: Make, own: Files, origin: CountingOrigin, tmp_path: Path, how: str, verify: str
) -> None:
    remote = rebased(own, origin.url, tmp_path / "remote.quiver")
    manifest = remote.opened()
    rows = rows_of(manifest, 2)
    lost, others = rows[3], [row for row in rows if row != rows[3]]
    LOSSES[how](own.folder / manifest.key(lost))
    cache = f"file://{tmp_path / 'cache'}"
    made = dataset(remote.manifest, cache, fields=["image", "__key__"], verify=verify)
    for sample in made.__getitems__(others):
        assert sample["image"] == own.content[sample["__key__"]]
    origin.reset()
    made.close()
    again = dataset(remote.manifest, cache, fields=["image", "__key__"], verify=verify)
    for sample in again.__getitems__(others):
        assert sample["image"] == own.content[sample["__key__"]]
    assert not origin.requests, "all of them from the cache"
    assert again.stats()["samples_host"] == len(others)
    with pytest.raises(Changed) as caught:
        again[lost]
    assert caught.value.keys == (manifest.key(lost),)
    assert again.stats()["corruptions"] <= 1


def test_a_lost_sample_that_is_there_again_is_mended_alone(
    dataset: Make, own: Files, origin: CountingOrigin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill_failures, "SHARD_SECONDS", (0.0, 0.0))
    remote = rebased(own, origin.url, tmp_path / "remote.quiver")
    manifest = remote.opened()
    rows = rows_of(manifest, 2)
    path = own.folder / manifest.key(rows[0])
    path.unlink()
    made = dataset(remote.manifest, f"file://{tmp_path / 'cache'}", fields=["image", "__key__"])
    made.__getitems__(rows[1:])
    with pytest.raises(Changed):
        made.__getitems__(rows)
    path.write_bytes(own.content[manifest.key(rows[0])])
    origin.reset()
    assert [sample["image"] for sample in made.__getitems__(rows)] == own.expected([manifest.key(row) for row in rows])
    assert list(origin.requests) == [manifest.key(rows[0])], "nothing else was read"
    name = manifest.shard_digest(2).hex()
    assert (tmp_path / "cache" / "shards" / name[:2] / name).is_file()
    assert not list((tmp_path / "cache" / "partial").rglob(name))


def test_a_partial_shard_is_evicted_like_any_other_and_counts(dataset: Make, own: Files, tmp_path: Path) -> None:
    manifest = own.opened()
    for shard in range(manifest.shard_count):
        (own.folder / manifest.key(rows_of(manifest, shard)[0])).unlink()
    capacity = int(manifest.tables.shard_sizes.max()) * 2
    made = dataset(own.manifest, f"file://{tmp_path / 'cache'}?capacity={capacity}", fields=["image", "__key__"])
    for shard in range(manifest.shard_count):
        for sample in made.__getitems__(rows_of(manifest, shard)[1:]):
            assert sample["image"] == own.content[sample["__key__"]]
        held = [path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file()]
        assert sum(held) <= capacity + 1000


@pytest.mark.fault("C2")
def test_a_rotten_partial_shard_loses_what_is_rotten_and_no_more(dataset: Make, own: Files, tmp_path: Path) -> None:
    manifest = own.opened()
    rows = rows_of(manifest, 2)
    (own.folder / manifest.key(rows[0])).unlink()
    cache = f"file://{tmp_path / 'cache'}"
    dataset(own.manifest, cache).__getitems__(rows[1:])
    [path] = [path for path in (tmp_path / "cache" / "partial").rglob("*") if path.is_file()]
    raw = bytearray(path.read_bytes())
    at = int(manifest.tables.offsets[manifest.tables.blob_of[rows[2]]])
    raw[at] ^= 1
    path.write_bytes(raw)
    made = dataset(own.manifest, cache, fields=["image", "__key__"], verify="off")
    for sample in made.__getitems__(rows[1:]):
        assert sample["image"] == own.content[sample["__key__"]]


def test_a_shard_of_which_all_is_lost_is_not_cached(dataset: Make, own: Files, tmp_path: Path) -> None:
    manifest = own.opened()
    for row in rows_of(manifest, 2):
        (own.folder / manifest.key(row)).unlink()
    made = dataset(own.manifest, f"file://{tmp_path / 'cache'}")
    with pytest.raises(Changed):
        made[rows_of(manifest, 2)[0]]
    assert not [path for path in (tmp_path / "cache" / "partial").rglob("*") if path.is_file()]


def test_a_loop_over_a_dataset_with_lost_files_reads_the_rest_once(
    dataset: Make, own: Files, origin: CountingOrigin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    remote = rebased(own, origin.url, tmp_path / "remote.quiver")
    manifest = remote.opened()
    (own.folder / manifest.key(rows_of(manifest, 2)[0])).unlink()
    made = dataset(remote.manifest, f"file://{tmp_path / 'cache'}", fields=["__key__", "image"])
    seen, lost = set(), 0
    for at in range(len(made)):
        try:
            seen.add(made[at]["__key__"])
        except QuiverError:
            lost += 1
    assert (len(seen), lost) == (59, 1)
    assert any("The rest of its shard is cached" in record.message for record in caplog.records)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
