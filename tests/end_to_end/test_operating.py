"""What operators see and do, on a real rack of two daemons: jobs, datasets, pins, evictions, metrics."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quiver.identity import Identity
from quiver.peer import PeerClient
from quiver.residency import ConsumerReport, Measured
from quiver.residency.messages import NeedsReport
from quiver_client.cli.main import run
from tests.support.daemon import Daemon, rack_of
from tests.support.data import Files, make_files, random_files
from tests.support.waiting import until


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Files:
    content = random_files(24, seed=5, low=60_000, high=60_001)
    return make_files(tmp_path_factory.mktemp("large"), content, name="large", shard_bytes=61_000)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Eight of the samples of ``large``, and four of its own."""
    content = dict(list(random_files(24, seed=5, low=60_000, high=60_001).items())[:8])
    content |= {f"own/{name}": data for name, data in random_files(4, seed=6, low=60_000, high=60_001).items()}
    return make_files(tmp_path_factory.mktemp("small"), content, name="small", shard_bytes=61_000)


class Rack:
    def __init__(self, daemons: list[Daemon], capsys: pytest.CaptureFixture[str]) -> None:
        self.daemons, self._capsys = daemons, capsys

    def quiver(self, *arguments: object) -> tuple[int, str, str]:
        self._capsys.readouterr()
        status = run([*map(str, arguments), "--cache", self.daemons[0].url])
        out, err = self._capsys.readouterr()
        return status, out, err

    def json(self, *arguments: object) -> dict:  # type: ignore[type-arg]
        status, out, err = self.quiver(*arguments, "--json")
        assert status == 0, err
        return json.loads(out)  # type: ignore[no-any-return]


@pytest.fixture
def rack(large: Files, small: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Rack]:
    with rack_of(2, tmp_path, origins=[large.folder, small.folder]) as daemons:
        yield Rack(daemons, capsys)


@contextlib.contextmanager
def reading(rack: Rack, files: Files, job: str, rate: float, *, ranks: int = 1) -> Iterator[None]:
    """Report what ranks of a job still need, to every daemon, as a loader does."""
    manifest = files.opened()
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(contextlib.closing(PeerClient(it.url))) for it in rack.daemons]
        reports = [
            ConsumerReport(
                f"{job}{rank}".encode().ljust(16, b"."),
                np.full(manifest.shard_count, 255, np.uint8),
                rate,
                1e12,
                60.0,
                identity=Identity(job, tenant="vision"),
                dataset_name=files.manifest.stem,
                measured=Measured(rate / 2, 0.25, 1000.0),
            )
            for rank in range(ranks)
        ]
        for peer in peers:
            for report in reports:
                peer.put_manifest(manifest.digest, files.manifest.read_bytes())
                peer.needs(NeedsReport(manifest.digest, report))
        yield
        for peer in peers:
            for report in reports:
                peer.needs(NeedsReport(manifest.digest, report, leaving=True))


def test_a_rack_tells_its_jobs_and_datasets_by_name_and_counts_each_rank_once(
    rack: Rack, large: Files, small: Files
) -> None:
    for files in (large, small):
        assert rack.quiver("warm", files.manifest)[0] == 0
    with reading(rack, large, "resnet", 4e6, ranks=2), reading(rack, small, "probe", 1e6):
        told = rack.json("jobs")
        rows = [(it["job"], it["tenant"], it["ranks"], it["rate"], it["throughput"]) for it in told["jobs"]]
        assert rows == [("resnet", "vision", 2, 8e6, 4e6), ("probe", "vision", 1, 1e6, 5e5)]
        assert told["jobs"][0]["waited"] == 0.25
        assert told["missing"] == {}
        by_name = {it["name"]: it for it in rack.json("datasets")["datasets"]}
        assert set(by_name) == {"large", "small"}
        manifest = large.opened()
        assert by_name["large"]["size_bytes"] == int(manifest.tables.shard_sizes.sum())
        assert by_name["large"]["resident_share"] == by_name["small"]["resident_share"] == 1.0
        resident = sum(it["resident_bytes"] for it in by_name.values())
        stored = sum(path.stat().st_size for it in rack.daemons for path in it.files())  # a busy rack may have copies
        assert sum(it["saved_bytes"] for it in by_name.values()) == pytest.approx(resident - stored, abs=4)
        assert resident - stored >= 8 * int(manifest.tables.shard_sizes[0])
        read = sum(it["read"]["origin"] for it in by_name.values())
        assert read >= len({path.name for it in rack.daemons for path in it.files()}) * 60_000
        assert by_name["large"]["readers"] == ["resnet"]
        status, out, err = rack.quiver("explain", "resnet")
        assert (status, err) == (0, "")
        assert "resnet of tenant vision reads large." in out
        assert "(f*)" in out
        status, out, err = rack.quiver("explain", "nothing")
        assert (status, out) == (1, "")
        assert err == (
            "error: no job or dataset is called 'nothing'; there are jobs probe, resnet; there are datasets large,"
            " small\n"
        )
        series = rack.daemons[0].ask("GET", "/metrics")[1].decode()
        assert 'quiver_dataset_wait_ratio{dataset="large",tenant="vision"} 0.25' in series
        digests = [str(it.opened().digest) for it in (large, small)]
        for path in ("/v1/jobs", "/v1/datasets", "/v1/allocation", "/metrics"):
            body = rack.daemons[0].ask("GET", path)[1].decode()
            assert not any(digest in body for digest in digests)
    assert rack.json("jobs")["jobs"] == []
    status, out, err = rack.quiver("jobs")
    assert (status, out.splitlines()[1:], err) == (0, [], "nobody reads from this rack now\n")


def test_an_empty_rack_says_so(rack: Rack) -> None:
    status, out, err = rack.quiver("datasets")
    assert (status, out.splitlines()[1:], err) == (0, [], "this rack holds no dataset, and nobody reads one\n")


def test_a_pin_is_kept_over_a_restart_and_what_is_pinned_is_not_evicted(rack: Rack, large: Files, small: Files) -> None:
    for files in (large, small):
        assert rack.quiver("warm", files.manifest)[0] == 0
    names = {it["size_bytes"]: it["id"] for it in rack.json("datasets")["datasets"]}
    pinned = names[int(small.opened().tables.shard_sizes.sum())]
    assert rack.quiver("pin", pinned)[0] == 0
    first = rack.daemons[0]
    first.kill()
    status, out, err = rack_of_one_away(rack)
    assert status == 0
    assert "pinned" not in err
    assert str(first.address[1]) in err, out
    first.start()
    first.wait_until_serving()
    assert {it["id"]: it["pinned_at"] for it in rack.json("datasets")["datasets"]}[pinned] == 2
    status, _, err = rack.quiver("evict", pinned)
    assert status == 1
    assert "is pinned" in err
    other = next(it for it in names.values() if it != pinned)
    with reading(rack, large, "resnet", 4e6):
        status, _, err = rack.quiver("evict", other)
        assert status == 2
        assert "--yes" in err
    before = files_of(rack, large)
    told = rack.json("evict", other, "--yes")
    assert told["evicted_bytes"] + told["kept_bytes"] == 60_048 * len(before)
    assert set(files_of(rack, large)) == shards_of(large) & shards_of(small)
    assert set(files_of(rack, small)) == shards_of(small)
    until(lambda: {it["id"]: it["resident_share"] for it in rack.json("datasets")["datasets"]}[pinned] == 1.0)
    assert rack.quiver("unpin", pinned)[0] == 0
    told = rack.json("evict", pinned, "--yes")
    assert told["evicted_bytes"] >= 4 * 60_048
    assert set(files_of(rack, small)) == shards_of(large) & shards_of(small)  # ``large`` was read a moment ago


def shards_of(files: Files) -> set[str]:
    manifest = files.opened()
    return {manifest.shard_digest(number).hex() for number in range(manifest.shard_count)}


def files_of(rack: Rack, files: Files) -> list[str]:
    """Return the names of the dataset's files on disk; where two daemons have one, it is there twice."""
    return [path.name for it in rack.daemons for path in it.files() if path.name in shards_of(files)]


def rack_of_one_away(rack: Rack) -> tuple[int, str, str]:
    """Ask the other daemon while the first one is away."""
    rack.daemons.reverse()
    told = rack.quiver("datasets")
    rack.daemons.reverse()
    return told
