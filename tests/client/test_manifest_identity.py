"""A dataset reads the manifest that it was made of, wherever it goes and whatever is under that name by then."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

from quiver.digest import Digest
from quiver.errors import BadRequest, Corrupt
from quiver.manifest import Manifest
from quiver_client import Dataset, index
from quiver_client.config import cache_home
from tests.support.daemon import Daemon
from tests.support.data import Files, make_files, random_files, write_files
from tests.support.forking import FORKED
from tests.support.scripts import Script
from tests.support.servers import CountingOrigin, counting_origin

pytestmark = pytest.mark.usefixtures("patient_reads")

Make = Callable[..., Dataset]


@pytest.fixture
def own(tmp_path: Path) -> Files:
    """40 samples that a test may change."""
    return make_files(tmp_path, random_files(40, low=4000, high=8000), shard_bytes="64KiB")


def index_others(own: Files, tmp_path: Path, *, in_place: bool) -> Digest:
    """Index 40 other files under the same name; return the digest of the old manifest."""
    old = own.opened().digest
    others = {name.replace("/", "/new"): data for name, data in random_files(40, seed=5, low=4000, high=8000).items()}
    target = tmp_path / "others.quiver" if in_place else own.manifest
    index(write_files(tmp_path / "others", others), target)
    if in_place:  # as `cp others.quiver data.quiver` does it
        with own.manifest.open("r+b") as file:
            file.truncate(0)
            file.write(target.read_bytes())
    assert own.opened().digest != old
    return old


def keys_in(dataset: Dataset, answer: Any) -> None:
    mapped = Path("/proc/self/maps").read_text()
    answer.put((sorted(sample["__key__"] for sample in dataset.__getitems__(range(40))), "quiver-manifest" in mapped))


@pytest.mark.fault("E9")
@pytest.mark.parametrize(
    ("start", "in_place"), [("fork", True), ("forkserver", True), ("forkserver", False), ("spawn", True)]
)
def test_a_worker_reads_what_its_parent_opened_whatever_was_indexed_since(
    own: Files, tmp_path: Path, dataset: Make, start: str, in_place: bool
) -> None:
    reading = dataset(own.manifest, f"file://{tmp_path}/cache", fields=["__key__", "label"])
    index_others(own, tmp_path, in_place=in_place)
    context: Any = FORKED if start == "forkserver" else multiprocessing.get_context(start)
    answer = context.SimpleQueue()
    worker = context.Process(target=keys_in, args=(reading, answer))
    worker.start()
    keys, shared = answer.get()
    worker.join()
    assert keys == sorted(own.content)
    assert shared == (start != "fork"), "passed as memory that all workers share; a forked one has its parent's"


@pytest.mark.fault("E9")
def test_a_stock_loader_with_a_new_worker_reads_each_sample_once(own: Files, tmp_path: Path, dataset: Make) -> None:
    reading = dataset(own.manifest, f"file://{tmp_path}/cache", fields=["__key__", "label"])
    index_others(own, tmp_path, in_place=True)
    loader = torch.utils.data.DataLoader(
        reading, batch_size=8, num_workers=1, multiprocessing_context=FORKED, collate_fn=list
    )
    assert sorted(sample["__key__"] for batch in loader for sample in batch) == sorted(own.content)


@pytest.mark.fault("E9")
def test_a_pickled_dataset_refuses_another_manifest_and_names_both(own: Files, tmp_path: Path, dataset: Make) -> None:
    pickled = pickle.dumps(dataset(own.manifest, f"file://{tmp_path}/cache"))
    assert len(pickle.loads(pickled)) == 40
    old = index_others(own, tmp_path, in_place=False)
    with pytest.raises(Corrupt) as caught:
        len(pickle.loads(pickled))
    for part in (str(own.manifest), old.short, own.opened().digest.short):
        assert part in str(caught.value)


@pytest.mark.fault("E9")
def test_where_memory_cannot_be_passed_a_worker_opens_the_same_manifest_or_none(
    own: Files, tmp_path: Path, dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Manifest, "share", lambda _: None)
    reading = dataset(own.manifest, f"file://{tmp_path}/cache", fields=["__key__", "label"])
    loader = torch.utils.data.DataLoader(
        reading, batch_size=8, num_workers=1, multiprocessing_context=FORKED, collate_fn=list
    )
    assert len(list(loader)) == 5
    index_others(own, tmp_path, in_place=True)
    with pytest.raises(RuntimeError, match="was expected"):  # as torch tells what a worker raised
        list(loader)


TRUNCATED = """
import os, sys
from quiver_client import Dataset
dataset = Dataset(sys.argv[1], sys.argv[2])
os.truncate(sys.argv[1], 0)
print([dataset[number]["label"] for number in range(40)], flush=True)
"""


def test_a_manifest_that_is_truncated_does_not_end_the_process(own: Files, tmp_path: Path) -> None:
    """A mapped one did: by SIGBUS, at the next label."""
    labels = own.opened().tables.scalars["label"].to_pylist()
    script = Script(TRUNCATED, [own.manifest, f"file://{tmp_path}/cache"], tmp_path / "log")
    try:
        assert script.wait() == 0
        assert script.lines() == [str(labels)]
    finally:
        script.kill()


def test_a_manifest_that_is_truncated_does_not_end_a_daemon(own: Files, tmp_path: Path, dataset: Make) -> None:
    with Daemon(tmp_path / "node", origins=[own.folder]) as daemon:
        reading = dataset(own.manifest, daemon.url, fields=["image", "__key__"])
        reading.__getitems__([0])  # the daemon has the manifest open, and filled one shard by it
        [kept] = daemon.files("manifests")
        os.truncate(kept, 0)
        for sample in reading.__getitems__(range(40)):
            assert sample["image"] == own.content[sample["__key__"]]
        assert own.opened().shard_count > 3
        assert daemon.status()["resident_bytes"] > own.total_bytes()
        assert reading.stats()["bytes_origin"] == 0


# -- ranks ------------------------------------------------------------------------------------------------------------

RANK = """
import sys
import torch.distributed
from quiver_client import DataLoader, Dataset

manifest, cache, store, rank = sys.argv[1:]
shared = torch.distributed.FileStore(store, 2)
torch.distributed.init_process_group("gloo", store=shared, rank=int(rank), world_size=2)
if rank == "1":
    shared.wait(["indexed"])
loader = DataLoader(Dataset(manifest, cache), batch_size=5, shuffle=True)
try:
    batches = len(list(loader))
    print("read", batches, flush=True)
    print("read again", len(list(loader)), flush=True)
    if rank == "0":
        shared.set("read", "")
except Exception as error:
    print(type(error).__name__, error, flush=True)
loader.close()
if rank == "1":
    shared.set("done", "")
else:
    shared.wait(["done"])
torch.distributed.destroy_process_group()
"""


@pytest.mark.fault("E9")
@pytest.mark.parametrize("again", [False, True], ids=["the same manifest", "indexed again"])
def test_ranks_compare_what_they_read_and_wait_for_nobody(own: Files, tmp_path: Path, again: bool) -> None:
    """The first rank reads two epochs before the other one begins: no collective holds it up."""
    shared = torch.distributed.FileStore(str(tmp_path / "store"), 3)
    arguments = (own.manifest, f"file://{tmp_path}/cache", tmp_path / "store")
    scripts = [Script(RANK, [*arguments, rank], tmp_path / f"log{rank}") for rank in (0, 1)]
    try:
        shared.wait(["read"])
        digests = [own.opened().digest.short]
        if again:
            index_others(own, tmp_path, in_place=False)
            digests.append(own.opened().digest.short)
        shared.set("indexed", "")
        assert [script.wait() for script in scripts] == [0, 0]
    finally:
        for script in scripts:
            script.kill()
    assert scripts[0].lines() == ["read 4", "read again 4"]
    if not again:
        assert scripts[1].lines() == ["read 4", "read again 4"]
        return
    [line] = scripts[1].lines()
    assert line.startswith("Misconfigured")
    assert all(digest in line for digest in digests)
    assert str(own.manifest) in line


# -- manifests at a URL -----------------------------------------------------------------------------------------------


@pytest.fixture
def remote(own: Files) -> Iterator[CountingOrigin]:
    with counting_origin(own.manifest.parent) as origin:
        yield origin


def kept_files() -> list[Path]:
    return sorted((cache_home() / "fetched").iterdir())


@pytest.fixture(autouse=True)
def own_cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.mark.parametrize("spoil", ["torn", "zeros", "one bit", "a link to nowhere"])
def test_a_kept_manifest_that_was_spoiled_is_fetched_again(
    own: Files, tmp_path: Path, remote: CountingOrigin, dataset: Make, spoil: str, caplog: pytest.LogCaptureFixture
) -> None:
    url, cache = f"{remote.url}data.quiver", f"file://{tmp_path}/cache"
    whole = own.manifest.read_bytes()
    assert len(dataset(url, cache)) == 40
    [kept] = kept_files()
    assert not caplog.records
    if spoil == "torn":
        os.truncate(kept, len(whole) // 2)
    elif spoil == "a link to nowhere":
        kept.unlink()
        kept.symlink_to("nowhere")
    else:
        at = len(whole) // 2
        middle = bytes(1000) if spoil == "zeros" else bytes([whole[at] ^ 1])
        kept.write_bytes(whole[:at] + middle + whole[at + len(middle) :])
    assert dataset(url, cache)[3]["label"] == dataset(own.manifest, cache)[3]["label"]
    assert [path.read_bytes() for path in kept_files()] == [whole]
    assert ("downloading http" in caplog.text) == (spoil != "a link to nowhere")


def test_a_manifest_that_is_wrong_where_it_lies_is_refused_by_its_url_and_not_kept(
    own: Files, tmp_path: Path, remote: CountingOrigin
) -> None:
    whole = own.manifest.read_bytes()
    own.manifest.write_bytes(whole[:-100])
    url = f"{remote.url}data.quiver"
    with pytest.raises(BadRequest, match=url):
        Dataset(url, f"file://{tmp_path}/cache")
    assert kept_files() == []
    own.manifest.write_bytes(whole)
    Dataset(url, f"file://{tmp_path}/cache").close()
