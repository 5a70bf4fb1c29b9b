"""``quiver place`` with real racks: each job goes where its data is, and what cannot be asked is named."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quiver_client import Dataset, warm
from quiver_client.cli.main import run
from tests.support.daemon import Daemon
from tests.support.data import Files, make_files, random_files
from tests.support.etcd import free_ports

Quiver = Callable[..., tuple[int, str, str]]


@pytest.fixture
def quiver(capsys: pytest.CaptureFixture[str]) -> Iterator[Quiver]:
    """Run a command in this process; return its status, and what it printed."""
    log = logging.getLogger("quiver_client")
    level = log.level

    def run_command(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = run([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    yield run_command
    log.setLevel(level)  # commands are quiet


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Files]:
    where = tmp_path_factory.mktemp("placed")
    return [
        make_files(where, random_files(60, seed=seed, low=2000, high=9000), name=name, shard_bytes="32KiB")
        for seed, name in ((1, "cats"), (2, "dogs"))
    ]


def placed(said: tuple[int, str, str]) -> Any:
    assert said[0] == 0, said
    return json.loads(said[1])


def test_each_job_goes_where_its_data_is_and_jobs_of_one_dataset_go_together(
    two: list[Files], quiver: Quiver, tmp_path: Path
) -> None:
    cats, dogs = two
    origins = [each.folder for each in two]
    with (
        Daemon(tmp_path / "a", "--rack", "a", origins=origins) as a,
        Daemon(tmp_path / "b", "--rack", "b", origins=origins) as b,
    ):
        for files, daemon in ((cats, b), (dogs, a)):
            dataset = Dataset(files.manifest, daemon.url)
            warm(dataset, keep_seconds=0)
            dataset.close()
        before = [daemon.status()["origin_read_bytes"] for daemon in (a, b)]
        racks = f"{a.url},{b.url}"
        report = placed(
            quiver("place", cats.manifest, f"{dogs.manifest}@1MB/s", cats.manifest, "--racks", racks, "--json")
        )
        assert [it["rack"] for it in report["placements"]] == ["b", "a", "b"]
        assert all(it["first_epoch_origin_bytes"] == it["origin_bytes"] == 0 for it in report["placements"])
        assert report["placements"][1]["first_epoch_seconds"] == pytest.approx(dogs.total_bytes() / 1e6, rel=0.05)
        elsewhere = report["placements"][0]["racks"][a.url]
        assert elsewhere["first_epoch_origin_bytes"] == report["placements"][0]["resident_bytes"] > 0
        assert [it["capacity_bytes"] for it in report["racks"]] == [1 << 30] * 2
        status, table, _ = quiver("place", cats.manifest, dogs.manifest, "--racks", racks)
        assert status == 0
        lines = table.splitlines()
        assert lines[0].split()[:3] == ["JOB", "RACK", "TURN"]
        assert [line.split()[:3] for line in lines[1:]] == [
            [str(dogs.manifest), "a", "1"],
            [str(cats.manifest), "b", "1"],
        ]
        assert "100% of it is there; all of it fits; b would take" in lines[1]
        assert [daemon.status()["origin_read_bytes"] for daemon in (a, b)] == before  # asking moves nothing


def test_no_time_is_made_up_where_nothing_is_known_of_the_origin_or_of_the_job(
    two: list[Files], quiver: Quiver, tmp_path: Path
) -> None:
    cats, dogs = (each.manifest for each in two)
    with Daemon(tmp_path / "a", origins=[each.folder for each in two]) as a:
        dataset = Dataset(cats, a.url)
        warm(dataset, keep_seconds=0)
        dataset.close()

        def seconds(*arguments: object) -> list[float | None]:
            report = placed(quiver("place", *arguments, "--racks", a.url, "--json"))
            assert [rack["origin_rate"] for rack in report["racks"]] == [1e6 if "--origin-rate" in arguments else 0]
            return [it["first_epoch_seconds"] for it in report["placements"]]

        assert seconds(cats, dogs) == [None, None]
        assert seconds(f"{cats}@1MB/s", dogs)[1] is None
        assert all(seconds(f"{cats}@1MB/s", dogs, "--origin-rate", "1MB/s"))
        table = quiver("place", cats, "--racks", a.url)[1]
        assert " ? " in table.splitlines()[1]


def test_a_rack_that_is_away_is_named_and_the_others_take_its_jobs(
    two: list[Files], quiver: Quiver, tmp_path: Path
) -> None:
    gone = f"http://127.0.0.1:{free_ports(1)[0]}"
    with Daemon(tmp_path / "a", "--rack", "a") as a:
        status, out, err = quiver("place", two[0].manifest, two[1].manifest, "--racks", f"{gone},{a.url}", "--json")
        assert status == 1
        report = json.loads(out)
        assert [it["rack"] for it in report["placements"]] == ["a", "a"]
        assert sorted(it["turn"] for it in report["placements"]) == [1, 2]
        assert list(report["away"]) == [gone]
        assert f"{gone}: left out" in err
        same = placed(quiver("place", two[0].manifest, "--racks", f"{a.url},{a.url}/", "--json"))
        assert [rack["rack"] for rack in same["racks"]] == ["a"]


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["M", "--racks", "http://127.0.0.1:9"], 1, "http://127.0.0.1:9"),
        (["M", "--racks", "http://127.0.0.1:9,http://127.0.0.1:7"], 1, "no rack answers"),
        (["/nowhere.quiver", "--racks", "http://127.0.0.1:9"], 1, "no manifest at /nowhere.quiver"),
        (["M", "--racks", ""], 2, "name 1 to 256 racks"),
        (["M", "--racks", "file:///tmp"], 2, "is a folder"),
        (["M", "--racks", "ftp://x"], 2, "--racks"),
        (["M"], 2, "--racks"),
        (["--racks", "http://127.0.0.1:9"], 2, "M.quiver"),
        (["M@0", "--racks", "http://127.0.0.1:9"], 2, "must be positive"),
        (["M", "--rate", "fast", "--racks", "http://127.0.0.1:9"], 2, "not a size: 'fast'"),
        (["M", "--epochs", "0", "--racks", "http://127.0.0.1:9"], 2, "--epochs"),
    ],
)
def test_wrong_use_and_failures_are_one_line(
    two: list[Files], quiver: Quiver, arguments: list[str], status: int, says: str
) -> None:
    own = str(two[0].manifest)
    done = quiver("place", *[own + each[1:] if each.startswith("M") else each for each in arguments])
    assert done[0] == status
    assert says in done[2]
    assert len(done[2].splitlines()) == 1
