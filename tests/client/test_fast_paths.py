"""Every fast way to a batch gives what the plain way gives: the same samples, the same bytes, the same errors."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quiver.manifest import Manifest
from quiver.store import Kind
from quiver.store.inventory import FolderInventory, file_of
from quiver_client import DataLoader, Dataset, index
from quiver_client import batch as batch_module
from quiver_client import shard_maps as maps_module
from quiver_client.collated_dataset import CollatedDataset
from quiver_client.embedded.tier import EmbeddedTier
from tests.support.columns import EVEN, FIELDS, SAMPLES, Truth, batch_of, outcome, same, truth_of, values
from tests.support.daemon import Daemon

pytestmark = pytest.mark.usefixtures("patient_reads")

Make = Callable[..., Dataset]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Parquet file with a column of each kind, in some ten shards."""
    where = tmp_path_factory.mktemp("columns")
    (where / "data").mkdir()
    pq.write_table(pa.table(values()), where / "data" / "all.parquet", row_group_size=50)
    index(where / "data", where / "all.quiver", shard_bytes="4KiB")
    assert Manifest.open(where / "all.quiver").shard_count >= 8
    return where / "all.quiver"


@pytest.fixture(scope="module")
def truth(manifest: Path) -> Truth:
    return truth_of(manifest)


@pytest.fixture(scope="module")
def daemon(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    where = tmp_path_factory.mktemp("daemon")
    with Daemon(where / "data", origins=[manifest.parent], capacity="64MiB") as daemon:
        yield daemon


@pytest.fixture(scope="module", params=["host", "rack"])
def cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "rack":
        daemon: Daemon = request.getfixturevalue("daemon")
        return daemon.url
    return f"file://{tmp_path_factory.mktemp('cache')}?capacity=64MiB"


def tier_of(made: Dataset) -> EmbeddedTier:
    return cast(EmbeddedTier, made._open().tiers[0])


def mapped_under(folder: Path, of_these: str = "") -> int:
    """How many files under a folder are mapped, removed ones too, or ``(deleted)`` ones only."""
    gc.collect()
    return sum(str(folder) in line and of_these in line for line in Path("/proc/self/maps").read_text().splitlines())


# -- batches by columns -----------------------------------------------------------------------------------------------

batches = st.lists(st.integers(-SAMPLES, SAMPLES - 1), min_size=1, max_size=60)
wanted = st.one_of(
    st.just(FIELDS), st.just(EVEN), st.lists(st.sampled_from(FIELDS), min_size=1, max_size=5, unique=True)
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(
    batches=st.lists(batches, min_size=1, max_size=3), fields=wanted, verify=st.sampled_from(["fast", "full", "off"])
)
def test_a_batch_by_columns_is_what_torch_collates_of_its_samples(
    *, dataset: Make, manifest: Path, truth: Truth, cache: str, batches: list[list[int]], fields: list[str], verify: Any
) -> None:
    made = dataset(manifest, cache, fields=fields, verify=verify)
    by_columns = CollatedDataset(made)
    for rows in batches:
        expected = outcome(lambda rows=rows: batch_of(truth, rows, fields))  # type: ignore[misc]
        assert same(outcome(lambda rows=rows: by_columns.__getitems__(rows)), expected)  # type: ignore[misc]
        samples = made.__getitems__(rows)
        assert all(same(samples[at], {name: truth[name][row] for name in fields}) for at, row in enumerate(rows))
    made.close()


@pytest.mark.parametrize("name", FIELDS)
def test_every_kind_of_field_is_collated_alone_and_in_a_loader(
    dataset: Make, manifest: Path, truth: Truth, cache: str, name: str
) -> None:
    made = dataset(manifest, cache, fields=[name])
    for rows in ([4, 0, 4, 119, 30], [0, 3, 5, 7, 9, 11]):  # the second with all that is odd
        loader = DataLoader(made, len(rows), sampler=rows)
        expected = outcome(lambda rows=rows: batch_of(truth, rows, [name]))  # type: ignore[misc]
        assert same(outcome(lambda loader=loader: next(iter(loader))), expected)  # type: ignore[misc]
        loader.close()


@pytest.mark.parametrize("verify", ["fast", "full", "off"])
def test_small_samples_of_one_size_are_gathered_and_give_what_they_give_where_they_lie(
    dataset: Make, manifest: Path, cache: str, verify: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [*np.random.default_rng(0).integers(0, SAMPLES, 200).tolist()]
    made = dataset(manifest, cache, fields=EVEN, verify=verify)
    found = []
    for gathered in (True, False):
        monkeypatch.setattr(batch_module, "SMALL_BYTES_MAX", 16 << 10 if gathered else 0)
        batch = made.read(made.checked(rows))
        assert batch is not None
        assert (batch._whole is not None) == (gathered and verify == "fast")
        found.append((CollatedDataset(made).__getitems__(rows), made.__getitems__(rows)))
    assert same(found[0][0], found[1][0])
    assert same(found[0][1], found[1][1])


@pytest.mark.parametrize("verify", ["fast", "full", "off"])
def test_samples_of_one_size_may_be_of_fields_that_are_not(dataset: Make, tmp_path: Path, verify: Any) -> None:
    sizes = np.arange(30) % 4
    columns = {
        "first": pa.array([b"f" * size for size in sizes]),
        "tokens": pa.array([[row, -row] for row in range(30)], pa.list_(pa.int32(), 2)),
        "last": pa.array([b"l" * (3 - size) for size in sizes]),
    }
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "data" / "all.parquet")
    index(tmp_path / "data", tmp_path / "all.quiver")
    made = dataset(tmp_path / "all.quiver", f"file://{tmp_path}/cache?capacity=64MiB", verify=verify)
    batch = CollatedDataset(made).__getitems__(range(30))
    assert batch["tokens"].tolist() == [[row, -row] for row in range(30)]
    assert batch["first"] == columns["first"].to_pylist()
    assert batch["last"] == columns["last"].to_pylist()
    assert made.stats()["corruptions"] == 0


@pytest.mark.parametrize("context", [None, "fork", "spawn"])
def test_workers_and_threads_deliver_each_sample_as_it_is(
    dataset: Make, manifest: Path, truth: Truth, cache: str, context: str | None
) -> None:
    fields = [name for name in FIELDS if name not in {"null", "unsigned"}]
    made = dataset(manifest, cache, fields=fields)
    CollatedDataset(made).__getitems__([0, 50, 100])  # used before a fork
    row_of = {key: row for row, key in enumerate(truth["__key__"])}
    loader = DataLoader(made, 25, shuffle=True, num_workers=2 if context else 0, multiprocessing_context=context)
    seen = []
    for batch in loader:
        rows = [row_of[key] for key in batch["__key__"]]
        assert same(batch, batch_of(truth, rows, fields))
        seen += rows
    assert sorted(seen) == list(range(SAMPLES))
    loader.close()


def test_threads_may_read_by_columns_at_once(dataset: Make, manifest: Path, truth: Truth, cache: str) -> None:
    made = dataset(manifest, cache, fields=[*EVEN, "blob"])
    by_columns, wrong = CollatedDataset(made), []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(15):
            rows = rng.integers(0, SAMPLES, 64).tolist()
            if not same(by_columns.__getitems__(rows), batch_of(truth, rows, made.fields)):
                wrong.append(rows)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert made.stats()["samples"] == 4 * 15 * 64


class Single(Dataset):
    def __getitem__(self, index: int) -> Any:
        return {"doubled": 2 * super().__getitem__(index)["small"]}


class Several(Dataset):
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [{"doubled": 2 * sample["small"]} for sample in super().__getitems__(indices)]


class Both(Several):
    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]


@pytest.mark.parametrize("kind", [Single, Several, Both])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_makes_its_samples_itself_is_not_read_by_columns(
    manifest: Path, truth: Truth, tmp_path: Path, kind: type[Dataset], workers: int
) -> None:
    made = kind(manifest, f"file://{tmp_path}?capacity=64MiB", fields=["small"])
    rows = [3, 0, 17, 3]
    expected = [2 * truth["small"][row] for row in rows]
    assert [made[row]["doubled"] for row in rows] == expected
    for kind_of_loader in (DataLoader, torch.utils.data.DataLoader):
        loader = kind_of_loader(made, 4, sampler=rows, num_workers=workers)
        batch = next(iter(loader))
        assert {name: column.tolist() for name, column in batch.items()} == {"doubled": expected}
        if isinstance(loader, DataLoader):
            loader.close()
    made.close()


# -- views ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "evict", "delete"])
@pytest.mark.parametrize("fields", [["blob", "gaps"], ["text"], ["empty"]], ids=str)
def test_views_are_the_bytes_and_stay_so_whatever_becomes_of_the_file(
    dataset: Make, manifest: Path, truth: Truth, tmp_path: Path, fields: list[str], end: str
) -> None:
    made = dataset(manifest, f"file://{tmp_path}/cache?capacity=64MiB", fields=fields, copy=False)
    CollatedDataset(made).__getitems__(range(SAMPLES))
    views = made.__getitems__(range(SAMPLES))
    match end:
        case "close":
            made.close()
        case "evict":
            evict(made)
            tier_of(made)._tidied = 0.0
            tier_of(made)._tidy()
            assert not len(tier_of(made)._mapped)
        case "delete":
            shutil.rmtree(tmp_path / "cache")
            made.close()
    gc.collect()
    for row, sample in enumerate(views):
        for name, view in sample.items():
            assert view is None or (isinstance(view, memoryview) and view.readonly)
            assert truth[name][row] == (None if view is None else bytes(view))
    del view, sample
    views.clear()
    made.close()
    assert mapped_under(tmp_path / "cache") == 0, "and the last view lets go of the map"


def test_views_of_a_rack_are_the_bytes_too(dataset: Make, manifest: Path, truth: Truth, daemon: Daemon) -> None:
    made = dataset(manifest, daemon.url, fields=["blob"], copy=False)
    views = [sample["blob"] for sample in made.__getitems__(range(SAMPLES))]
    made.close()
    assert all(isinstance(view, memoryview) and view.readonly for view in views)
    assert [bytes(view) for view in views] == truth["blob"]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_views_arrive_as_bytes_where_a_worker_sends_them(
    dataset: Make, manifest: Path, truth: Truth, tmp_path: Path, context: str
) -> None:
    made = dataset(manifest, f"file://{tmp_path}/cache?capacity=64MiB", fields=["blob"], copy=False)
    loader = DataLoader(made, 60, num_workers=1, multiprocessing_context=context, timeout=60)
    assert [blob for batch in loader for blob in batch["blob"]] == truth["blob"]
    loader.close()


# -- files that go and files that rot ---------------------------------------------------------------------------------


def shards_of(made: Dataset) -> list[Any]:
    return [made.manifest.shard_digest(shard) for shard in range(made.manifest.shard_count)]


def evict(made: Dataset) -> None:
    for digest in shards_of(made):
        tier_of(made).store.drop(Kind.SHARD, digest)


def test_a_shard_that_was_evicted_while_mapped_is_read_on_and_filled_again_once_it_was_let_go_of(
    dataset: Make, manifest: Path, truth: Truth, tmp_path: Path
) -> None:
    made = dataset(manifest, f"file://{tmp_path}/cache?capacity=64MiB", fields=EVEN)
    rows = np.random.default_rng(0).integers(0, SAMPLES, 200).tolist()
    expected = batch_of(truth, rows, EVEN)
    assert same(CollatedDataset(made).__getitems__(rows), expected)
    count = made.manifest.shard_count
    assert made.stats()["fills"] == count
    evict(made)
    tier_of(made)._tidied = float("inf")
    assert same(CollatedDataset(made).__getitems__(rows), expected)
    assert made.stats()["fills"] == count
    assert mapped_under(tmp_path / "cache") == count
    tier_of(made)._tidied = 0.0
    assert same(CollatedDataset(made).__getitems__(rows), expected)
    assert made.stats()["fills"] == 2 * count
    assert mapped_under(tmp_path / "cache") == count, "the old maps are gone, the new ones are there"


def test_a_map_of_a_file_in_whose_place_there_is_another_keeps_no_room(
    dataset: Make, manifest: Path, truth: Truth, tmp_path: Path
) -> None:
    made, theirs = (dataset(manifest, f"file://{tmp_path}/cache?capacity=64MiB", fields=EVEN) for _ in range(2))
    CollatedDataset(made).__getitems__(range(SAMPLES))
    evict(theirs)
    CollatedDataset(theirs).__getitems__(range(SAMPLES))  # which brings all of it in again
    theirs.close()
    assert mapped_under(tmp_path / "cache", "(deleted)") == made.manifest.shard_count
    tier_of(made)._tidied = 0.0
    assert same(CollatedDataset(made).__getitems__(range(SAMPLES)), batch_of(truth, range(SAMPLES), EVEN))
    assert mapped_under(tmp_path / "cache", "(deleted)") == 0
    assert mapped_under(tmp_path / "cache") == made.manifest.shard_count


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("where", ["host", "rack"])
def test_wrong_bytes_of_small_samples_are_found_gathered_or_not(
    *, dataset: Make, manifest: Path, truth: Truth, tmp_path: Path, where: str, gathered: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(batch_module, "SMALL_BYTES_MAX", 16 << 10 if gathered else 0)
    with Daemon(tmp_path / "data", origins=[manifest.parent], capacity="64MiB") as daemon:
        root = tmp_path / ("data" if where == "rack" else "cache")
        cache = daemon.url if where == "rack" else f"file://{root}?capacity=64MiB"
        made = dataset(manifest, cache, fields=EVEN)
        expected = batch_of(truth, range(SAMPLES), EVEN)
        assert same(CollatedDataset(made).__getitems__(range(SAMPLES)), expected)
        for flipped in ([40], [0, 17, 18, 90]):
            flip(made, root, flipped)
            trusting = dataset(manifest, cache, fields=EVEN, verify="off")
            odd = CollatedDataset(trusting).__getitems__(range(SAMPLES))["tokens"] != expected["tokens"]
            assert odd.any(1).nonzero().flatten().tolist() == flipped, "the fault is really there"
            before = made.stats()["corruptions"]
            assert same(CollatedDataset(made).__getitems__(range(SAMPLES)), expected)
            assert made.stats()["corruptions"] >= before + len(flipped)
            samples = made.__getitems__(range(SAMPLES))
            assert all(same(sample["tokens"], truth["tokens"][row]) for row, sample in enumerate(samples))
        if where == "host":
            assert made.stats()["samples_origin"] == 0, "the shards were mended"


def flip(made: Dataset, root: Path, rows: list[int]) -> None:
    """Change a byte of each of these samples in the files of a cache."""
    for row in rows:
        batch = made.read(made.checked([row]))
        assert batch is not None
        path = file_of(root, Kind.SHARD, made.manifest.shard_digest(int(batch.plan.shards[0])))
        path.chmod(0o600)
        with path.open("r+b") as file:
            file.seek(int(batch.plan.offsets[0]) + 3)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))


def test_maps_are_bounded_and_closed(
    dataset: Make, manifest: Path, truth: Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maps_module, "MAPS_MAX", 3)
    made = dataset(manifest, f"file://{tmp_path}/cache?capacity=64MiB", fields=EVEN)
    for rows in (range(SAMPLES), range(0, SAMPLES, 2), [7]):
        assert same(CollatedDataset(made).__getitems__(rows), batch_of(truth, list(rows), EVEN)), (
            "of more shards than maps"
        )
        assert mapped_under(tmp_path / "cache") <= 3
    assert mapped_under(tmp_path / "cache") == 3
    tier = tier_of(made)
    made.close()
    assert mapped_under(tmp_path / "cache") == 0
    assert not len(tier._mapped), "and not only because nobody has the tier any more"


@pytest.mark.parametrize("then", ["read", "close"])
def test_what_is_read_through_maps_counts_as_read_for_those_who_share_the_folder(
    dataset: Make, manifest: Path, tmp_path: Path, then: str
) -> None:
    made = dataset(manifest, f"file://{tmp_path}/cache?capacity=64MiB", fields=EVEN)
    CollatedDataset(made).__getitems__(range(SAMPLES))
    tier, (used, unused) = tier_of(made), shards_of(made)[:2]
    tier._tidied = 0.0
    CollatedDataset(made).__getitems__(range(SAMPLES))  # which tells of all that was read until now
    files = [file_of(tier.store.root, Kind.SHARD, digest) for digest in (used, unused)]
    for file in files:
        os.utime(file, (1, 1))
    cast(FolderInventory, tier.store.inventory)._touched.clear()
    list(tier._mapped._maps.mapped())
    CollatedDataset(made).__getitems__([0])
    if then == "read":
        tier._tidied = 0.0
        CollatedDataset(made).__getitems__([0])
    else:
        made.close()
    assert [file.stat().st_mtime > 1 for file in files] == [True, False]
