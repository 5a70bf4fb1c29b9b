"""``quiver warm --state``: a job that stopped resumes in another rack, which reads what was left and nothing else."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import Subset

from quiver.sizes import format_size
from quiver_client import DataLoader, Dataset, Mix, warm
from quiver_client.cli.main import run
from tests.support.daemon import Daemon, Patient
from tests.support.data import Files, make_files, random_files
from tests.support.etcd import free_ports
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("patient_reads")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Files:
    files = random_files(160, seed=8, low=2000, high=9000)
    return make_files(tmp_path_factory.mktemp("moved"), files, shard_bytes="32KiB")


@pytest.fixture
def rack(own: Files, tmp_path: Path) -> Iterator[list[Daemon]]:
    """Two daemons of one rack."""
    ports = free_ports(2)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    daemons = [
        Patient(tmp_path / str(port), "--peers", ",".join(urls), origins=[own.folder], port=port) for port in ports
    ]
    with daemons[0], daemons[1]:
        yield daemons


class Said(NamedTuple):
    """What a command printed, and its exit status."""

    returncode: int
    stdout: str
    stderr: str


Quiver = Callable[..., Said]


@pytest.fixture
def quiver(capsys: pytest.CaptureFixture[str]) -> Iterator[Quiver]:
    """Run a command in this process: an interpreter takes longer to start than any of them runs."""
    log = logging.getLogger("quiver_client")
    level = log.level

    def run_command(*arguments: object) -> Said:
        capsys.readouterr()
        status = run([str(argument) for argument in arguments])
        return Said(status, *capsys.readouterr())

    yield run_command
    log.setLevel(level)  # commands are quiet


def keys(loader: DataLoader, batches: int | None = None) -> list[str]:
    seen: list[str] = []
    reading = iter(loader)
    for at, batch in enumerate(reading):
        seen += batch["__key__"]
        if at + 1 == batches:
            break
    reading.close()
    return seen


def loader_of(own: Files, cache: str, **how: Any) -> DataLoader:
    dataset = Dataset(own.manifest, cache, fields=["image", "__key__"])
    return DataLoader(dataset, 8, shuffle=True, seed=5, **how)


def ended(loader: DataLoader) -> None:
    loader.close()
    loader.dataset.close()  # type: ignore[attr-defined]


def read_bytes(rack: list[Daemon]) -> int:
    return sum(daemon.status()["origin_read_bytes"] for daemon in rack)


@pytest.mark.parametrize("substitute", [True, False])
def test_a_job_resumes_in_a_warmed_rack_and_the_origin_is_read_for_what_was_left_alone(
    own: Files, rack: list[Daemon], quiver: Quiver, tmp_path: Path, substitute: bool
) -> None:
    first = loader_of(own, f"file://{tmp_path}/rack1", substitute=substitute)
    seen = keys(first, 10)
    torch.save({"model": {}, "loader": first.state_dict()}, tmp_path / "last.ckpt")
    ended(first)
    said = quiver("warm", own.manifest, "--state", tmp_path / "last.ckpt", "--cache", rack[0].url, "--json")
    assert said.returncode == 0, said.stderr
    report = json.loads(said.stdout)
    assert report["resident"] == report["shards"] == report["brought_shards"]
    assert report["samples_left"] == 80
    assert report["in_order"] == (not substitute)
    assert report["kept_seconds"] == 600
    assert [daemon.metric("quiver_consumers") for daemon in rack] == [1, 1]  # what will be needed counts as needed
    # The samples; the bytes of shards include their tables. If a loaded machine suspends a daemon for seconds, others
    # fill in its place: how much is read at rest is measured by ``bench.allocation``.
    brought = read_bytes(rack)
    assert 0.95 * report["bytes"] < brought < 2 * report["bytes"]
    if substitute:
        assert report["bytes"] < 0.75 * own.total_bytes()
    rest = loader_of(own, rack[1].url, substitute=substitute)
    rest.load_state_dict(torch.load(tmp_path / "last.ckpt", weights_only=True)["loader"])
    seen += keys(rest)
    stats = rest.stats()
    ended(rest)
    assert sorted(seen) == sorted(own.content)
    if not stats["fallbacks"]:  # a daemon that a loaded machine suspends for seconds is passed over for the origin
        # In a fixed order the uses of the next epoch are known, too, and there is room to fetch ahead for them.
        assert brought <= read_bytes(rack) <= (brought if substitute else max(brought, own.total_bytes()))
        assert stats["bytes_origin"] == 0
    again = quiver("warm", own.manifest, "--state", tmp_path / "last.ckpt", "--cache", rack[0].url, "--keep", "0")
    assert f"{report['shards']} were there, 0 were filled" in again.stdout
    assert "kept" not in again.stdout
    until(lambda: [daemon.metric("quiver_consumers") for daemon in rack] == [0, 0], what="no consumer is left")


def test_what_does_not_fit_is_left_out_and_what_was_filled_stays(own: Files, quiver: Quiver, tmp_path: Path) -> None:
    manifest = own.opened()
    sizes = manifest.tables.shard_sizes
    loader = loader_of(own, f"file://{tmp_path}/rack1", substitute=False)
    keys(loader, 1)
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    ended(loader)
    capacity = int(sizes.sum()) // 2
    with Daemon(tmp_path / "d", origins=[own.folder], capacity=f"{capacity}") as daemon:
        done = quiver("warm", own.manifest, "--state", tmp_path / "state.pt", "--cache", daemon.url, "--json")
        report = json.loads(done.stdout)
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
        assert f"{report['left_out_shards']} of {report['shards']} shards do not fit into the cache" in done.stderr
        assert daemon.url in done.stderr
        assert "give the cache more capacity" in done.stderr
        assert report["resident"] + report["left_out_shards"] == report["shards"]
        assert report["resident_bytes"] + report["left_out_bytes"] == report["bytes"]
        brought = daemon.status()["origin_read_bytes"]  # with some that several fills at once found room for
        assert 0.95 * report["resident_bytes"] < brought < 1.2 * report["resident_bytes"]
        assert daemon.status()["shards"] == report["resident"] > 0
        plain = quiver("warm", own.manifest, "--cache", daemon.url)
        assert plain.returncode == 1
        assert f"of {len(sizes)} shards of {own.manifest} are in the cache (" in plain.stdout
        assert f" of {format_size(int(sizes.sum()))}): {report['resident']} were there, " in plain.stdout
        assert " do not fit (" in plain.stdout
        assert "do not fit into the cache" in plain.stderr


def test_a_part_is_warmed_by_the_dataset_that_the_job_makes(
    own: Files, rack: list[Daemon], quiver: Quiver, tmp_path: Path
) -> None:
    def part(cache: str) -> Dataset:
        return Dataset(own.manifest, cache, fields=["image", "__key__"]).select(range(40))

    first = DataLoader(part(f"file://{tmp_path}/rack1"), 8, shuffle=True)
    seen = keys(first, 2)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    ended(first)
    there = part(rack[0].url)
    moved = []
    warmed = warm(there, tmp_path / "state.pt", progress=moved.append)
    assert warmed.brought == warmed.needed == warmed.resident
    assert sum(moved) == warmed.needed.bytes
    brought = read_bytes(rack)
    assert warmed.remaining is not None
    assert warmed.remaining.samples == 24
    rest = DataLoader(there, 8, shuffle=True)
    rest.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert len(seen + keys(rest)) == 40
    assert read_bytes(rack) == brought
    ended(rest)
    with pytest.raises(ValueError, match="warm each of its parts"):
        warm(Mix({"a": there}))
    subset = Dataset(own.manifest, rack[0].url)
    assert warm(Subset(subset, range(40))).needed.shards == warm(subset.select(range(40))).there.shards
    subset.close()
    refused = quiver("warm", own.manifest, "--state", tmp_path / "state.pt", "--cache", rack[0].url)
    assert_line(refused, 1, "with 40 samples, and this one is", "quiver_client.warm")


def assert_line(done: Said, status: int, *says: str) -> None:
    assert done.returncode == status
    assert len(done.stderr.splitlines()) == 1
    for each in says:
        assert each in done.stderr


def test_bad_input_is_refused_in_one_line_before_anything_is_read(own: Files, quiver: Quiver, tmp_path: Path) -> None:
    manifest = own.manifest
    other = {"version": 1, "dataset": "cd" * 32, "samples": 80, "seed": 0, "shuffle": True, "epoch": 3, "rank": 1}
    other |= {"world_size": 2, "batch_size": 8, "drop_last": False, "batches": 4, "done": None, "own": None}
    state = tmp_path / "other.json"
    state.write_text(json.dumps({"loader": other}))
    digest = str(own.opened().digest)
    cache = ("--cache", "http://127.0.0.1:9")
    assert_line(
        quiver("warm", manifest, "--state", state, *cache), 1, str(state), f"{'cd' * 6}…", f"{digest[:12]}…", "160"
    )
    mine = other | {"dataset": digest, "samples": 160, "own": [255] * 9 + [0]}
    state.write_text(json.dumps(mine))
    assert_line(quiver("warm", manifest, "--state", state, *cache), 1, "give one state of each of 2 ranks")
    assert_line(quiver("warm", manifest, "--state", tmp_path / "gone", *cache), 1, "there is no checkpoint at")
    assert_line(quiver("warm", manifest, "--state-key", "loader", *cache), 2, "--state")
    assert_line(quiver("warm", manifest, "--keep", "2 weeks", *cache), 2, "--keep", "90s")
