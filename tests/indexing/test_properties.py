"""Properties of a manifest's shards for any content, by which two users share shards."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.errors import BadRequest
from quiver.manifest import ABSENT, Manifest
from quiver_client.indexing import index
from quiver_client.indexing.assemble import representatives
from tests.indexing.support import read_back, shard_names, warned, write_tar, write_tree

FEW = settings(max_examples=15, deadline=None)
seeds = st.integers(0, 2**32 - 1)


@contextmanager
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="quiver-test-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def contents(seed: int, count: int) -> list[bytes]:
    """Return samples of very different sizes, some of them equal."""
    random = np.random.default_rng(seed)
    sizes = random.integers(0, 1 << random.integers(1, 11, count))
    found = [random.bytes(int(size)) for size in sizes]
    return [*found, *found[: count // 10]]


def indexed(root: Path, name: str, files: dict[str, bytes], **options: str | Path) -> Path:
    index(write_tree(root / name, files), root / f"{name}.quiver", shard_bytes="4KiB", **options)  # type: ignore[arg-type]
    return root / f"{name}.quiver"


@given(seed=seeds, count=st.integers(1, 120))
@FEW
def test_shards_do_not_depend_on_names_or_order(seed: int, count: int) -> None:
    data = contents(seed, count)
    shuffled = np.random.default_rng(seed + 1).permutation(len(data))
    with folder() as root:
        one = indexed(root, "one", {f"{i:04d}": item for i, item in enumerate(data)})
        other = indexed(root, "other", {f"x/{i % 3}/{at}.bin": data[i] for at, i in enumerate(shuffled)})
        assert shard_names(one) == shard_names(other)


@given(seed=seeds, count=st.integers(10, 120), removed=st.integers(1, 5))
@FEW
def test_a_copy_with_n_samples_fewer_has_at_most_n_shards_of_its_own(seed: int, count: int, removed: int) -> None:
    data = list(dict.fromkeys(contents(seed, count)))
    with folder() as root:
        whole = indexed(root, "whole", {f"{i}": item for i, item in enumerate(data)})
        less = indexed(root, "less", {f"{i}": item for i, item in enumerate(data[removed:])} | {"z": data[-1]})
        assert len(set(shard_names(less)) - set(shard_names(whole))) <= removed


@given(seed=seeds, count=st.integers(2, 100), more=st.integers(1, 50))
@FEW
def test_an_appended_dataset_keeps_all_its_sequential_shards_but_the_last(seed: int, count: int, more: int) -> None:
    data = contents(seed, count + more)
    with folder() as root:
        old = indexed(root, "old", {f"{i:05d}": item for i, item in enumerate(data[:count])}, layout="sequential")
        new = indexed(root, "new", {f"{i:05d}": item for i, item in enumerate(data)}, layout="sequential")
        kept = shard_names(old)[:-1]
        assert shard_names(new)[: len(kept)] == kept


@given(seed=seeds, count=st.integers(1, 100), more=st.integers(0, 50), layout=st.sampled_from(["mixed", "sequential"]))
@FEW
def test_with_a_base_every_old_shard_is_kept_and_only_new_samples_get_new_ones(
    seed: int, count: int, more: int, layout: str
) -> None:
    data = contents(seed, count + more)
    with folder() as root:
        old = indexed(root, "old", {f"{i}": item for i, item in enumerate(data[:count])}, layout=layout)
        files = {f"new/{i}": item for i, item in enumerate(data)}
        new = indexed(root, "new", files, base=old)
        assert set(shard_names(old)) <= set(shard_names(new))
        assert Manifest.open(new).header.layout == layout
        assert {key: sample["data"] for key, sample in read_back(new).items()} == files


def test_a_shard_of_the_base_that_lost_a_sample_is_not_kept_and_is_reported(tmp_path: Path) -> None:
    files = {f"{i}": np.random.default_rng(i).bytes(500) for i in range(100)}
    old = indexed(tmp_path, "old", files)
    del files["7"]
    write_tree(tmp_path / "new", files)
    report = index(tmp_path / "new", tmp_path / "new.quiver", shard_bytes="4KiB", base=old)
    gone = set(shard_names(old)) - set(shard_names(tmp_path / "new.quiver"))
    assert len(gone) == 1
    assert report.reused_shards == len(shard_names(old)) - 1
    assert "shards of the base not kept, since samples in them are gone" in warned(report)
    assert len(read_back(tmp_path / "new.quiver")) == 99


def test_a_base_with_other_fields_is_refused(tmp_path: Path) -> None:
    old = indexed(tmp_path, "old", {"a": b"1"})
    write_tar(tmp_path / "t.tar", [("a.jpg", b"1")])
    with pytest.raises(BadRequest, match="has the byte fields data, the source jpg"):
        index(tmp_path / "t.tar", tmp_path / "m.quiver", base=old)


def test_the_same_tar_gives_the_same_bytes_whatever_the_timing(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    for i in range(12):
        write_tar(tmp_path / "d" / f"{i}.tar", [(f"{j}.{e}", random.bytes(90)) for j in range(40) for e in ("a", "b")])
    index(tmp_path / "d", tmp_path / "one.quiver")
    index(tmp_path / "d", tmp_path / "two.quiver")
    assert (tmp_path / "one.quiver").read_bytes() == (tmp_path / "two.quiver").read_bytes()


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from([0, 5, ABSENT])), min_size=1, max_size=60)
)
@FEW
def test_samples_are_equal_if_bytes_and_fields_are_even_when_their_digests_begin_alike(
    rows: list[tuple[int, int, int]],
) -> None:
    digests = np.zeros((len(rows), 32), np.uint8)
    digests[:, 0] = [row[0] for row in rows]
    digests[:, 31] = [row[1] for row in rows]  # after the 64 bits of the sort key
    lengths = np.asarray([[row[2], 1] for row in rows], np.uint64)
    assert representatives(digests, lengths).tolist() == [rows.index(row) for row in rows]


def test_separate_files_in_order_are_cut_by_content_and_not_by_position(tmp_path: Path) -> None:
    for number in range(600):
        path = tmp_path / "d" / f"{number:04d}.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(os.urandom(1000))
    index(tmp_path / "d", tmp_path / "all.quiver", layout="sequential", shard_bytes="32KiB")
    (tmp_path / "d" / "0000.bin").unlink()
    index(tmp_path / "d", tmp_path / "less.quiver", layout="sequential", shard_bytes="32KiB")
    everything, less = shard_names(tmp_path / "all.quiver"), shard_names(tmp_path / "less.quiver")
    assert len(set(less) - set(everything)) < len(set(less)) / 2
