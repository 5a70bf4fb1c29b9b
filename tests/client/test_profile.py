"""``DataLoader.profile()`` and probing, with a real origin that sends slowly, and a real daemon."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from quiver_client import BatchSampler, DataLoader, Dataset, Mix, Profile
from quiver_client.cli.main import run
from quiver_client.cli.probe import command as probe
from quiver_client.loader import probing
from tests.support.daemon import Daemon
from tests.support.data import Files, make_files, random_files, rebased
from tests.support.origins import ScriptedOrigin, Way, scripted_origin
from tests.support.waiting import until

STEP_SECONDS = 0.02
BATCH = 10


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_files(
        tmp_path_factory.mktemp("profile"), random_files(200, low=20_000, high=20_001), shard_bytes=200_000
    )


@pytest.fixture
def slow(files: Files) -> Iterator[ScriptedOrigin]:
    """An origin that takes a quarter of a second per sample: far longer than the loop steps, on a busy machine, too."""
    with scripted_origin(files.folder, lambda name: Way(bytes_per_second=80_000)) as origin:
        yield origin


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes may take most of the time, and are few."""
    monkeypatch.setattr(probing, "SHARE", 0.9)
    monkeypatch.setattr(probing, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(probing, "BATCHES", 4)


def key_and_bytes(sample: dict[str, Any]) -> tuple[str, int]:
    return sample["__key__"], len(next(value for value in sample.values() if isinstance(value, bytes)))


def read_through(loader: DataLoader, step_seconds: float = 0.0) -> list[str]:
    """Read one epoch as a loop with steps of so long; return the keys that it was handed."""
    keys: list[str] = []
    for names, _ in loader:
        keys += names
        time.sleep(step_seconds)  # the loop's own step: what is measured
    return keys


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fixed_order_that_the_origin_holds_back_says_what_it_could_read(
    dataset: Callable[..., Dataset], files: Files, slow: ScriptedOrigin, tmp_path: Path, workers: int
) -> None:
    at_slow = rebased(files, slow.url, tmp_path / "slow.quiver")
    # Two shards of twenty: every batch of the shuffle misses most of its samples.
    cache = f"file://{tmp_path / 'cache'}?capacity=450KB"
    data = dataset(
        at_slow.manifest, cache, fields=[*Dataset(files.manifest).fields, "__key__"], transform=key_and_bytes
    )
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, substitute=False, num_workers=workers)
    try:
        keys = read_through(loader, STEP_SECONDS)
        profile = loader.profile()
    finally:
        loader.close()
    assert Counter(keys) == Counter(list(files.content))
    assert isinstance(profile, Profile)
    assert profile.step_seconds >= STEP_SECONDS
    # Held back by far more than half, it still says what its step allows.
    assert profile.wait_share > 0.3
    assert profile.possible_rate > 1.5 * profile.throughput
    assert profile.possible_rate <= profile.batch_bytes / STEP_SECONDS * 1.01
    assert profile.attained_bytes == pytest.approx(files.total_bytes(), rel=0.01)
    assert profile.tiers["origin"].bytes + profile.tiers["embedded"].bytes > files.total_bytes() / 2
    assert profile.probed is None
    assert json.loads(json.dumps(profile.as_dict()))["makers"] == (workers or 2)


def test_a_stock_loader_without_workers_tells_reads_from_its_step(
    dataset: Callable[..., Dataset], files: Files, slow: ScriptedOrigin, tmp_path: Path
) -> None:
    at_slow = rebased(files, slow.url, tmp_path / "slow.quiver")
    data = dataset(at_slow.manifest, f"file://{tmp_path / 'cache'}?capacity=450KB").select(range(80))
    order = BatchSampler(data, 5, shuffle=True, substitute=False)
    try:
        for _ in torch.utils.data.DataLoader(data, batch_sampler=order, collate_fn=list):
            time.sleep(STEP_SECONDS)  # the loop's own step
        [speed] = order.speeds
    finally:
        order.close()
    assert speed.step_seconds >= STEP_SECONDS
    assert speed.waited > 0.3
    assert speed.possible > 1.5 * speed.throughput


def test_the_parts_of_a_mixture_share_its_turns(dataset: Callable[..., Dataset], files: Files, tmp_path: Path) -> None:
    cache = f"file://{tmp_path / 'cache'}?capacity=1GB"
    whole = dataset(files.manifest, cache)
    mix = Mix({"often": whole.select(range(150)), "seldom": whole.select(range(150, 200))}, weights=[9, 1])
    loader = DataLoader(mix, batch_size=4, shuffle=True)
    try:
        for number, _ in enumerate(loader):
            time.sleep(STEP_SECONDS)
            if number == 40:
                break
        often, seldom = loader.order.speeds
        profile = loader.profile()
    finally:
        loader.close()
    assert 3 < often.possible / seldom.possible < 27
    assert profile.possible_rate == pytest.approx(often.possible + seldom.possible)
    assert profile.batch_samples == pytest.approx(4, rel=0.2)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("substitute", [True, False])
def test_probed_batches_come_from_the_origin_and_change_nothing_else(
    dataset: Callable[..., Dataset], files: Files, tmp_path: Path, workers: int, substitute: bool
) -> None:
    cache = f"file://{tmp_path / 'cache'}?capacity=1GB"
    fields = [*Dataset(files.manifest).fields, "__key__"]
    data = dataset(files.manifest, cache, fields=fields, transform=key_and_bytes)
    epochs: dict[bool, list[list[str]]] = {}
    for probes in (False, True):
        loader = DataLoader(
            data, batch_size=4, shuffle=True, num_workers=workers, substitute=substitute, seed=3, probe=probes
        )
        try:
            epochs[probes] = [read_through(loader) for _ in range(2)]
            ends_at = time.monotonic() + 60
            while probes and (loader.is_probing or loader.profile().probed is None) and time.monotonic() < ends_at:
                epochs[probes].append(read_through(loader))
            probed = loader.profile().probed
        finally:
            loader.close()
        assert (probed is not None) == probes
    assert all(Counter(keys) == Counter(list(files.content)) for keys in epochs[True])
    if not substitute:
        assert epochs[True][:2] == epochs[False]
    assert probed is not None
    assert probed.batches == probing.BATCHES
    assert probed.hits > 0
    assert probed.miss_seconds > 0
    if not workers:
        assert data.stats()["samples_origin"] >= 4 * probed.batches


@pytest.mark.usefixtures("hasty")
def test_a_probe_that_the_origin_does_not_answer_is_read_from_the_cache(
    dataset: Callable[..., Dataset], files: Files, tmp_path: Path
) -> None:
    with scripted_origin(files.folder) as origin:
        served = rebased(files, origin.url, tmp_path / "served.quiver")
        fields = [*Dataset(files.manifest).fields, "__key__"]
        data = dataset(
            served.manifest, f"file://{tmp_path / 'cache'}?capacity=1GB", fields=fields, transform=key_and_bytes
        )
        loader = DataLoader(data, batch_size=4, shuffle=True, probe=True)
        try:
            list(data.select(range(len(data))))  # all of it is in the cache
            origin.all(Way(status=403))
            assert Counter(read_through(loader)) == Counter(list(files.content))
            assert loader.profile().probed is None
        finally:
            loader.close()


@pytest.mark.usefixtures("hasty")
def test_an_operator_has_a_running_job_probed(dataset: Callable[..., Dataset], files: Files, tmp_path: Path) -> None:
    stop = threading.Event()
    with Daemon(tmp_path / "node", origins=[files.folder]) as daemon:
        data = dataset(files.manifest, daemon.url, fields=[*Dataset(files.manifest).fields, "__key__"])
        loader = DataLoader(data, batch_size=4, shuffle=True, job="resnet-7")

        def train() -> None:
            while not stop.is_set():
                for _ in loader:
                    if stop.wait(0.002):
                        break

        loop = threading.Thread(target=train)
        loop.start()
        try:
            until(lambda: daemon.json("/v1/jobs")["jobs"])
            told = CliRunner().invoke(probe, ["resnet-7", "--cache", daemon.url, "--json"])
            assert told.exit_code == 0, told.output
            found = json.loads(told.output)
            assert (found["job"], found["series"], found["ranks"]) == ("resnet-7", 1, 1)
            assert found["hits"] > 0 < found["misses"]
            assert found["rate"] > 0
            for_people = CliRunner().invoke(probe, ["resnet-7", "--cache", daemon.url])
            assert "if all is in the cache" in for_people.output
            assert daemon.json("/v1/jobs")["jobs"]
        finally:
            stop.set()
            loop.join()
            loader.close()


def test_a_job_that_nobody_knows_is_one_clear_line(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Daemon(tmp_path / "node", origins=[files.folder]) as daemon:
        assert run(["probe", "nobody", "--cache", daemon.url]) == 1
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert "no job called 'nobody'" in told
        assert run(["probe", "no\x07body", "--cache", daemon.url]) == 2
        assert run(["probe", "nobody", "--cache", f"file://{tmp_path}"]) == 2
        assert daemon.ask("POST", "/v1/probe", b'{"job": ""}')[0] == 400
        assert daemon.ask("POST", "/v1/probe", b"[")[0] == 400
