"""``Dataset``: the bytes of the files, through whatever cache, in whatever process."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from quiver.errors import BadRequest, Misconfigured, NotFound, Unavailable
from quiver_client import Dataset
from tests.support.daemon import Daemon
from tests.support.data import Files, make_files, random_files, rebased
from tests.support.etcd import free_ports
from tests.support.servers import counting_origin

pytestmark = pytest.mark.usefixtures("patient_reads")

Make = Callable[..., Dataset]
STATS = ("samples", "bytes_host", "bytes_rack", "bytes_origin", "substitutions", "fallbacks", "corruptions")


@pytest.fixture(params=["rack of three", "rack of one", "embedded", "embedded and tiny"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "rack of three":
            daemons: list[Daemon] = request.getfixturevalue("rack")
            return ",".join(daemon.url.removeprefix("http://") for daemon in daemons).join(["http://", ""])
        case "rack of one":
            lone: Daemon = request.getfixturevalue("lone")
            return lone.url
        case "embedded":
            return f"file://{tmp_path}/cache?capacity=1GiB"
    return f"file://{tmp_path}/cache?capacity=600KiB"


def check(dataset: Dataset, files: Files, indices: list[int]) -> None:
    samples = dataset.__getitems__(indices)
    keys = [dataset.manifest.key(index) for index in indices]
    assert [sample["image"] for sample in samples] == files.expected(keys)


# -- what a sample is -------------------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15, deadline=None)
@given(batches=st.lists(st.lists(st.integers(-150, 149), max_size=30), min_size=1, max_size=3))
def test_any_batch_is_the_bytes_of_its_files(dataset: Make, files: Files, cache: str, batches: list[list[int]]) -> None:
    made = dataset(files.manifest, cache)
    for batch in batches:
        check(made, files, batch)
    assert made.stats()["samples"] == sum(map(len, batches))
    made.close()


@pytest.mark.parametrize("verify", ["fast", "full", "off"])
def test_cached_equals_uncached_whatever_is_verified(dataset: Make, files: Files, cache: str, verify: Any) -> None:
    made = dataset(files.manifest, cache, fields=["image", "label", "__key__"], verify=verify)
    for _ in range(2):
        for index in np.random.default_rng(0).permutation(len(made)).tolist():
            sample = made[index]
            assert list(sample) == ["image", "label", "__key__"]
            assert sample["image"] == files.content[sample["__key__"]]
            assert type(sample["image"]) is bytes
            assert type(sample["label"]) is int
            assert made.classes[sample["label"]] == sample["__key__"][0]
    stats = made.stats()
    assert set(STATS) <= set(stats)
    assert all(isinstance(value, int) for value in stats.values())
    assert stats["samples"] == 2 * len(made)
    assert stats["corruptions"] == stats["substitutions"] == stats["fallbacks"] == 0


def test_indices_are_checked_as_a_list_checks_them(dataset: Make, files: Files, lone: Daemon) -> None:
    made = dataset(files.manifest, lone.url)
    count = len(made)
    assert made[-1] == made[count - 1]
    assert made[np.int64(3)] == made[torch.tensor(3)] == made[np.uint8(3)] == made[3]
    for wrong in (count, -count - 1, 10**30, -(10**30), np.uint64(2**64 - 1)):
        with pytest.raises(IndexError):
            made[wrong]  # type: ignore[index]
    for wrong in ("0", 0.0, None, True, [0]):
        with pytest.raises(TypeError, match="integers"):
            made[wrong]  # type: ignore[index]
    assert made.__getitems__([]) == []
    assert made.__getitems__(np.array([5, 5, 0])) == [made[5], made[5], made[0]]
    with pytest.raises(IndexError):
        made.__getitems__([0, count])


def test_fields_are_chosen_and_unknown_ones_refused_by_name(dataset: Make, files: Files, lone: Daemon) -> None:
    assert list(dataset(files.manifest, lone.url)[0]) == ["image", "label"]
    assert list(dataset(files.manifest, lone.url, fields=["__key__"])[7]) == ["__key__"]
    labels = dataset(files.manifest, lone.url, fields=("label",))
    assert labels[0] == {"label": labels.manifest.scalars("label", np.array([0]))[0]}
    assert labels.stats()["bytes_rack"] == 0, "scalars come from the manifest alone"
    with pytest.raises(ValueError, match=r"no field 'img'.*image, label"):
        Dataset(files.manifest, lone.url, fields=["img"])
    for nothing in ([], "image"):
        with pytest.raises(ValueError, match="list of names"):
            Dataset(files.manifest, lone.url, fields=nothing)
    with pytest.raises(ValueError, match="fast, full or off"):
        Dataset(files.manifest, lone.url, verify="yes")  # type: ignore[arg-type]


def test_a_transform_gets_each_sample(dataset: Make, files: Files, lone: Daemon) -> None:
    made = dataset(files.manifest, lone.url, transform=lambda sample: len(sample["image"]))
    assert made.__getitems__([1, 2]) == [len(files.content[made.manifest.key(at)]) for at in (1, 2)]


def webdataset(where: Path) -> tuple[Path, dict[str, dict[str, bytes]]]:
    """Write tars of samples with several fields, some empty."""
    import io
    import tarfile

    rng = np.random.default_rng(4)
    content = {}
    for tar in range(2):
        with tarfile.open(where / f"{tar:03}.tar", "w") as file:
            for number in range(20):
                key = f"{tar}-{number:03}"
                fields = {"jpg": rng.bytes(3000 + number), "json": b"{}" if number % 3 else b"", "txt": key.encode()}
                content[key] = fields
                for name, data in fields.items():
                    info = tarfile.TarInfo(f"{key}.{name}")
                    info.size = len(data)
                    file.addfile(info, io.BytesIO(data))
    return where, content


@pytest.mark.parametrize("verify", ["fast", "full", "off"])
@pytest.mark.parametrize("fields", [None, ["jpg"], ["json"], ["txt", "jpg"], ["txt", "__key__", "json"]])
def test_samples_of_several_fields_give_each_its_own(
    dataset: Make, tmp_path: Path, verify: Any, fields: list[str] | None
) -> None:
    from quiver_client import index

    source, content = webdataset(tmp_path)
    index(source, tmp_path / "m.quiver", shard_bytes="16KiB")
    made = dataset(tmp_path / "m.quiver", f"file://{tmp_path}/cache", fields=fields, verify=verify)
    for index_, sample in enumerate(made.__getitems__(list(range(len(made))))):
        expected = content[made.manifest.key(index_).rpartition("/")[2]]
        for name in sample:
            assert sample[name] == (made.manifest.key(index_) if name == "__key__" else expected[name])
        assert list(sample) == (fields or ["jpg", "json", "txt"])


def test_empty_files_are_samples_too(dataset: Make, tmp_path: Path, cache: str) -> None:
    files = make_files(tmp_path, {"a/empty.png": b"", "a/full.png": b"x" * 50, "b/empty too.png": b""})
    made = dataset(files.manifest, cache, fields=["image", "__key__"])
    for batch in ([0], [0, 1, 2], [2, 0]):
        for sample in made.__getitems__(batch):
            assert sample["image"] == files.content[sample["__key__"]]


def test_a_dataset_tells_what_it_is(dataset: Make, files: Files, lone: Daemon) -> None:
    made = dataset(files.manifest, lone.url)
    assert str(files.manifest) in repr(made)
    assert "150 samples" in repr(made)
    assert len(made) == 150
    assert made.classes == ("a", "b", "c")


# -- where the cache is -----------------------------------------------------------------------------------------------


def test_the_cache_may_come_from_the_environment(
    dataset: Make, files: Files, lone: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIVER_CACHE", lone.url)
    made = dataset(files.manifest)
    check(made, files, [1, 2, 3])
    assert made.stats()["bytes_rack"] > 0
    monkeypatch.delenv("QUIVER_CACHE")
    embedded = dataset(str(files.manifest))
    check(embedded, files, [1, 2, 3])
    assert embedded.stats()["bytes_host"] > 0
    assert (Path(os.environ["XDG_CACHE_HOME"]) / "quiver" / "shards").is_dir()


@pytest.mark.parametrize(
    "cache",
    ["node1", "ftp://x", "https://node:1", "http://", "http://a:b", "file://host/x", "file:///x?capacity=lots",
     "file:///x?size=1GiB", "http://u:p@h:1", "http://h:1/path", "http://h:0"],
)  # fmt: skip
def test_a_cache_that_is_none_is_refused_with_what_to_write(files: Files, cache: str) -> None:
    with pytest.raises(Misconfigured) as caught:
        Dataset(files.manifest, cache)
    assert "http://" in str(caught.value) or "200GiB" in str(caught.value) or "capacity" in str(caught.value)


def test_a_rack_that_does_not_answer_is_said_at_once(files: Files) -> None:
    (port,) = free_ports(1)
    begun = time.monotonic()
    with pytest.raises(Unavailable, match=f"127.0.0.1:{port}.*is one running there"):
        Dataset(files.manifest, f"http://127.0.0.1:{port}")
    assert time.monotonic() - begun < 5


def test_a_missing_or_foreign_manifest_is_said_by_name(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="quiver index"):
        Dataset(tmp_path / "none.quiver")
    (tmp_path / "foreign.quiver").write_bytes(b"x" * 100)
    with pytest.raises(BadRequest, match=r"foreign\.quiver"):
        Dataset(tmp_path / "foreign.quiver")


def test_a_capacity_smaller_than_a_shard_is_refused(files: Files, tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"smaller than one shard.*--shard-size"):
        Dataset(files.manifest, f"file://{tmp_path}/cache?capacity=100KiB")
    message = r"node tiny is smaller than one shard.*--shard-size"
    with (
        Daemon(tmp_path / "node", "--node-id", "tiny", capacity="100KiB") as daemon,
        pytest.raises(Misconfigured, match=message),
    ):
        Dataset(files.manifest, daemon.url)


def test_a_manifest_may_lie_at_a_url(dataset: Make, files: Files) -> None:
    with counting_origin(files.manifest.parent) as origin:
        made = dataset(f"{origin.url}{files.manifest.name}")
        check(made, files, [0, 1])
        dataset(f"{origin.url}{files.manifest.name}")
        with pytest.raises(NotFound, match=r"none\.quiver"):
            Dataset(f"{origin.url}none.quiver")


# -- processes and threads --------------------------------------------------------------------------------------------


def test_a_dataset_pickles_small_and_works_after_it(dataset: Make, files: Files, cache: str) -> None:
    made = dataset(files.manifest, cache)
    check(made, files, [0])
    raw = pickle.dumps(made)
    assert len(raw) < 1500
    copy = pickle.loads(raw)
    check(copy, files, [1, 2])
    copy.close()
    check(copy, files, [3])
    copy.close()


def loaded(made: Dataset, **more: Any) -> list[list[Any]]:
    loader = DataLoader(made, batch_size=16, collate_fn=list, **more)
    return [[sample for batch in loader for sample in batch] for _ in range(2)]


@pytest.mark.fault("E4")
@pytest.mark.parametrize(
    ("method", "persistent"), [("fork", False), ("fork", True), ("spawn", True), ("forkserver", True)]
)
def test_workers_of_every_kind_deliver_each_sample_once(
    dataset: Make, files: Files, lone: Daemon, method: str, persistent: bool
) -> None:
    made = dataset(files.manifest, lone.url, fields=["image", "__key__"])
    check(made, files, [0, 1])  # used before it is forked
    more = {"num_workers": 2, "multiprocessing_context": method, "persistent_workers": persistent, "shuffle": True}
    for epoch in loaded(made, **more):
        assert {sample["__key__"]: sample["image"] for sample in epoch} == files.content
        assert len(epoch) == len(files.content)


@pytest.mark.fault("E4")
def test_embedded_workers_after_use_in_the_parent(dataset: Make, files: Files, tmp_path: Path) -> None:
    made = dataset(files.manifest, f"file://{tmp_path}/cache", fields=["image", "__key__"])
    check(made, files, [0, 1])
    for epoch in loaded(made, num_workers=2, shuffle=True):
        assert {sample["__key__"]: sample["image"] for sample in epoch} == files.content
    check(made, files, [2])


def test_a_remote_origin_may_be_read_before_and_after_a_fork(dataset: Make, files: Files, tmp_path: Path) -> None:
    with counting_origin(files.folder) as origin:
        remote = rebased(files, origin.url, tmp_path / "remote.quiver")
        made = dataset(remote.manifest, f"file://{tmp_path}/cache", fields=["image", "__key__"])
        check(made, files, [0, 1])
        for epoch in loaded(made, num_workers=2, shuffle=True):
            assert {sample["__key__"]: sample["image"] for sample in epoch} == files.content
        check(made, files, list(range(150)))
        assert origin.bytes_sent == files.total_bytes(), "processes of one machine read each shard once"


def test_closing_ends_the_helper_even_while_a_forked_child_lives(dataset: Make, files: Files, tmp_path: Path) -> None:
    with counting_origin(files.folder) as origin:
        remote = rebased(files, origin.url, tmp_path / "remote.quiver")
        made = dataset(remote.manifest, f"file://{tmp_path}/cache")
        check(made, files, [0])
        stop = multiprocessing.get_context("fork").Event()
        child = multiprocessing.get_context("fork").Process(target=stop.wait)
        child.start()
        try:
            closed = threading.Event()
            threading.Thread(target=lambda: (made.close(), closed.set()), daemon=True).start()
            assert closed.wait(10), "close() waits for a helper that a child's copy of its socket keeps alive"
        finally:
            stop.set()
            child.join()


def test_a_distributed_sampler_shares_the_dataset_out(dataset: Make, files: Files, lone: Daemon) -> None:
    made = dataset(files.manifest, lone.url, fields=["__key__"])
    keys: list[str] = []
    for rank in range(3):
        sampler = DistributedSampler(made, num_replicas=3, rank=rank, shuffle=True)
        loader = DataLoader(made, batch_size=8, sampler=sampler, collate_fn=list)
        keys += [sample["__key__"] for batch in loader for sample in batch]
    assert sorted(keys) == sorted(files.content)


def test_threads_may_share_a_dataset(dataset: Make, files: Files, cache: str) -> None:
    made = dataset(files.manifest, cache)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for _ in range(5):
                check(made, files, np.random.default_rng(seed).permutation(150)[:40].tolist())
        except BaseException as error:  # noqa: BLE001  told to the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert made.stats()["samples"] == 6 * 5 * 40


def test_nothing_is_left_open_when_a_dataset_is_closed_or_forgotten(files: Files, cache: str) -> None:
    def look() -> tuple[Counter[str], int]:
        gc.collect()
        folder = Path("/proc/self/fd")
        links = [link.readlink() for link in folder.iterdir() if link.is_symlink()]
        return Counter(re.sub(r"\d+", "N", str(link)) for link in links), threading.active_count()

    def use(end: Callable[[Dataset], None]) -> None:
        made = Dataset(files.manifest, cache)
        check(made, files, list(range(0, 150, 3)))
        end(made)

    use(Dataset.close)
    opened, threads = look()
    for end in (Dataset.close, lambda made: None):  # closed, forgotten
        use(end)
        now, running = look()
        assert now - opened == Counter(), "nothing more is open (what other tests left may have gone meanwhile)"
        assert running <= threads


def _epoch(files: Files, cache: str, out: Any) -> None:
    made = Dataset(files.manifest, cache)
    check(made, files, np.random.default_rng(os.getpid()).permutation(150).tolist())
    out.put(made.stats())
    made.close()


def test_processes_that_share_a_folder_read_the_origin_once(files: Files, tmp_path: Path) -> None:
    with counting_origin(files.folder) as origin:
        remote = rebased(files, origin.url, tmp_path / "remote.quiver")
        context = multiprocessing.get_context("fork")
        out = context.Queue()
        workers = [context.Process(target=_epoch, args=(remote, f"file://{tmp_path}/cache", out)) for _ in range(4)]
        for worker in workers:
            worker.start()
        stats = [out.get(timeout=60) for _ in workers]
        for worker in workers:
            worker.join()
        assert [worker.exitcode for worker in workers] == [0] * 4
        out.close()
        out.join_thread()
        assert origin.bytes_sent == files.total_bytes()
        assert sum(each["fills"] for each in stats) == files.opened().shard_count
        assert sum(each["bytes_origin"] for each in stats) == files.total_bytes()


def test_an_embedded_cache_smaller_than_the_dataset_keeps_what_it_has(dataset: Make, tmp_path: Path) -> None:
    files = make_files(tmp_path, random_files(150, seed=8), shard_bytes="128KiB")
    made = dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1MiB")
    held: list[int] = []
    for _ in range(3):
        check(made, files, list(range(150)))
        held.append(sum(path.stat().st_size for path in (tmp_path / "cache" / "shards").rglob("*") if path.is_file()))
    assert held[0] == held[1] == held[2]
    assert 500_000 < held[0] <= 1_048_576, "kept, and not thrashed"
    stats = made.stats()
    assert stats["samples_host"] > 0
    assert stats["samples_host"] + stats["samples_origin"] == 450


def test_a_second_user_reads_nothing_from_the_origin(dataset: Make, files: Files, tmp_path: Path) -> None:
    cache = f"file://{tmp_path}/cache"
    check(dataset(files.manifest, cache), files, list(range(150)))
    renamed = {f"x/{at}.png": data for at, data in enumerate(reversed(files.content.values()))}
    other = make_files(tmp_path, renamed, name="other")
    made = dataset(other.manifest, cache)
    check(made, other, list(range(150)))
    assert made.stats()["bytes_origin"] == made.stats()["fills"] == 0
