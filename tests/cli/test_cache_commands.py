"""``quiver verify``, ``warm`` and ``status`` as programs, with a daemon, a folder and the origin itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quiver_client.cli.main import run
from tests.support.daemon import Daemon, clean_environment
from tests.support.data import Files, make_files, random_files, rewritten
from tests.support.etcd import free_ports


def quiver(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from quiver_client.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=clean_environment())


@pytest.fixture
def own(tmp_path: Path) -> Files:
    """A dataset that a test may damage."""
    return make_files(tmp_path, random_files(30, seed=8), name="own", shard_bytes="64KiB")


def test_verify_detects_a_wrong_bit_in_a_manifest(own: Files, tmp_path: Path) -> None:
    whole = bytearray(own.manifest.read_bytes())
    labels = own.opened().tables.scalars["label"].to_numpy().tobytes()
    assert whole.count(labels) == 1
    whole[whole.find(labels)] ^= 4
    wrong = tmp_path / "wrong.quiver"
    wrong.write_bytes(whole)
    found = quiver("verify", wrong)
    assert (found.returncode, found.stdout) == (1, "")
    [line] = found.stderr.splitlines()
    assert "does not match its checksum" in line
    assert str(wrong) in line


def test_verify_says_what_it_cannot_verify_of_a_manifest_without_checksums(own: Files, tmp_path: Path) -> None:
    older = rewritten(own.manifest, tmp_path / "older.quiver", lambda header: None)
    found = quiver("verify", older)
    assert found.returncode == 0
    note, right = found.stdout.splitlines()
    assert "no checksums: its labels and keys could not be verified" in note
    assert "all right" in right
    assert [json.loads(quiver("verify", path, "--json").stdout)["checksums"] for path in (older, own.manifest)] == [
        False,
        True,
    ]


def test_a_dataset_is_warmed_once_and_then_verified_from_the_cache(own: Files, tmp_path: Path) -> None:
    with Daemon(tmp_path / "d", origins=[own.folder]) as daemon:
        warmed = quiver("warm", own.manifest, "--cache", daemon.url, "--json")
        assert warmed.returncode == 0, warmed.stderr
        assert json.loads(warmed.stdout)["resident"] == own.opened().shard_count == daemon.status()["shards"]
        verified = quiver("verify", own.manifest, "--cache", daemon.url, "--json")
        assert verified.returncode == 0, verified.stderr
        said = json.loads(verified.stdout)
        assert said["ok"]
        assert said["bytes_by_tier"] == {"host": 0, "rack": own.total_bytes(), "origin": 0}
        told = json.loads(quiver("status", "--cache", daemon.url, "--json").stdout)
        assert set(told) >= {"rack", "members", "resident_bytes", "capacity_bytes", "origin_read_bytes"}
        assert told["origin_read_bytes"] == own.total_bytes()
        assert set(told["members"][0]) >= {"id", "url", "state", "resident_bytes", "capacity_bytes"}


def test_wrong_bytes_in_a_cache_are_reported_and_replaced(own: Files, tmp_path: Path) -> None:
    with Daemon(tmp_path / "d", origins=[own.folder]) as daemon:
        assert quiver("warm", own.manifest, "--cache", daemon.url).returncode == 0
        victim = daemon.files()[0]
        victim.write_bytes(b"\xff" + victim.read_bytes()[1:])
        found = quiver("verify", own.manifest, "--cache", daemon.url)
        assert found.returncode == 1
        assert "replaced: " in found.stdout
        assert "wrong bytes in the rack" in found.stdout
        again = quiver("verify", own.manifest, "--cache", daemon.url)
        assert again.returncode == 0, again.stdout


def test_verify_names_exactly_what_the_origin_lost(own: Files) -> None:
    first, second = sorted(own.content)[:2]
    (own.folder / first).unlink()
    (own.folder / second).write_bytes(bytes(len(own.content[second])))
    found = quiver("verify", own.manifest, "--json")
    assert found.returncode == 1
    assert sorted(entry["key"] for entry in json.loads(found.stdout)["lost"]) == [first, second]


def test_warm_fails_if_a_shard_cannot_be_filled(own: Files, tmp_path: Path) -> None:
    (own.folder / sorted(own.content)[0]).unlink()
    failed = quiver("warm", own.manifest, "--cache", f"file://{tmp_path}/cache")
    assert failed.returncode == 1
    assert "1 of" in failed.stderr
    assert len(failed.stderr.splitlines()) == 1


def test_status_names_an_unreachable_member_and_fails(tmp_path: Path) -> None:
    gone = f"http://127.0.0.1:{free_ports(1)[0]}"
    with Daemon(tmp_path / "d", "--peers", gone) as daemon:
        told = quiver("status", "--cache", daemon.url)
        assert told.returncode == 1
        assert f"{gone}: cannot be reached" in told.stderr
        as_json = quiver("status", "--cache", daemon.url, "--json")
        assert as_json.returncode == 1
        states = {member["url"]: member["state"] for member in json.loads(as_json.stdout)["members"]}
        assert states == {gone: "unreachable", daemon.url: "up"}


def test_a_daemon_that_never_reached_etcd_says_so_in_its_status(tmp_path: Path) -> None:
    absent = f"http://127.0.0.1:{free_ports(1)[0]}"
    with Daemon(tmp_path / "d", "--etcd", absent) as daemon:
        told = quiver("status", "--cache", daemon.url)
        assert told.returncode == 0, told.stderr
        assert f"etcd at {absent}" in told.stderr
        assert "a ring of this daemon alone" in told.stderr
        assert "--etcd" in told.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["status", "--cache", "foo://"], 2, "http://HOST"),
        (["status", "--cache", "http://127.0.0.1:9"], 1, "is the daemon running there?"),
        (["status", "--cache", "file:///nowhere"], 1, "there is no cache"),
        (["warm", "M", "--cache", "http://127.0.0.1:9"], 1, "no daemon answers"),
        (["warm", "M"], 2, "--cache"),
        (["verify", "M", "--cache", "file:///tmp?size=1"], 2, "size"),
        (["verify", "/nowhere.quiver"], 1, "no manifest at /nowhere.quiver"),
    ],
)
def test_usage_errors_and_failures_are_one_line(own: Files, arguments: list[str], status: int, says: str) -> None:
    done = quiver(*[own.manifest if argument == "M" else argument for argument in arguments])
    assert done.returncode == status
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not Path("/nowhere").exists()


LIMITED = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
from quiver_client.cli import main
main()
"""


def test_warm_says_that_the_disk_refuses_files(own: Files, tmp_path: Path) -> None:
    environment = {**clean_environment(), "XDG_CACHE_HOME": str(tmp_path)}
    arguments = ["warm", str(own.manifest), "--cache", f"file://{tmp_path}/cache"]
    failed = subprocess.run(
        [sys.executable, "-c", LIMITED, *arguments],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
        env=environment,
    )
    assert failed.returncode == 1
    assert f"cannot write to {tmp_path}/cache" in failed.stderr
    assert "lost" not in failed.stderr
    assert "no room" not in failed.stderr


def test_warm_says_that_the_capacity_is_too_small(own: Files, tmp_path: Path) -> None:
    largest = int(own.opened().tables.shard_sizes.max())
    failed = quiver("warm", own.manifest, "--cache", f"file://{tmp_path}/cache?capacity={largest * 2}")
    assert failed.returncode == 1
    assert "all in use" in failed.stderr
    assert "more capacity" in failed.stderr
    assert "lost" not in failed.stderr


def test_warm_names_a_lost_sample_and_caches_the_rest_of_its_shard(own: Files, tmp_path: Path) -> None:
    manifest = own.opened()
    number = next(each for each in range(manifest.shard_count) if len(manifest.shard_blobs(each)) > 1)
    [gone] = manifest.keys_of_blobs(np.asarray([manifest.shard_blobs(number).start]))
    (own.folder / gone).unlink()
    for _ in range(2):
        failed = quiver("warm", own.manifest, "--cache", f"file://{tmp_path}/cache")
        assert failed.returncode == 1
        assert repr(gone) in failed.stderr
        assert "quiver verify" in failed.stderr
        assert "room" not in failed.stderr
    assert len([path for path in (tmp_path / "cache" / "partial").rglob("*") if path.is_file()]) == 1


def test_warm_says_why_a_daemon_could_not_fill(own: Files, tmp_path: Path) -> None:
    (own.folder / sorted(own.content)[0]).unlink()
    with Daemon(tmp_path / "data", origins=[own.folder]) as daemon:
        failed = quiver("warm", own.manifest, "--cache", daemon.url)
        assert failed.returncode == 1
        assert f"{daemon.url} could not fill it" in failed.stderr
        assert "room" not in failed.stderr


@pytest.mark.parametrize("command", [["warm", "m"], ["drain", "n"], ["undrain", "n"], ["probe", "job"]])
@pytest.mark.parametrize("cache", ["", " "])
def test_an_empty_cache_as_of_an_unset_variable_is_wrong_usage_where_one_is_needed(
    command: list[str], cache: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, "--cache", cache]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "'--cache'" in line
    assert "it is empty; write http://HOST:7717" in line


def test_a_probe_of_no_job_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["probe", "", "--cache", "http://127.0.0.1:1"]) == 2
    assert "it is empty; `quiver jobs` lists" in capsys.readouterr().err
