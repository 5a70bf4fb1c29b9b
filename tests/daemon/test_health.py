"""A daemon that cannot cache says so: not ready, in its status, once in its log and once in its clients' logs."""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import socket
from pathlib import Path

import pytest

from quiver.errors import QuiverError
from quiver.wire import RangeStatus
from quiver_client import Dataset
from quiver_client.cli.main import run
from tests.daemon.test_routes import read
from tests.support.daemon import Daemon, FreshDaemon
from tests.support.data import Files, make_files, random_files, rebased
from tests.support.servers import HostileServer, counting_origin, ok
from tests.support.waiting import until


@pytest.fixture
def small(tmp_path: Path) -> Files:
    return make_files(tmp_path, random_files(30, seed=1), shard_bytes="64KiB")


def ready(daemon: Daemon) -> tuple[int, str]:
    status, body, _ = daemon.ask("GET", "/readyz")
    return status, body.decode()


def read_all(files: Files, daemon: Daemon) -> Dataset:
    with contextlib.ExitStack() as undo:
        dataset = Dataset(files.manifest, daemon.url, fields=["image", "__key__"])
        undo.callback(dataset.close)
        for sample in dataset.__getitems__(list(range(len(dataset)))):
            assert sample["image"] == files.content[sample["__key__"]]
        undo.pop_all()
    return dataset


def failures(daemon: Daemon) -> str:
    lines = daemon.ask("GET", "/metrics")[1].decode().splitlines()
    return "\n".join(line for line in lines if line.startswith("quiver_fill_failures_total"))


def test_a_folder_that_is_not_there_is_said_at_the_start_and_when_it_comes(tmp_path: Path) -> None:
    missing = tmp_path / "mount" / "data"
    with Daemon(tmp_path / "node", origins=[tmp_path, missing]) as daemon:
        status, body = ready(daemon)
        assert status == 503
        assert f"origin {missing}: there is no folder {missing}" in body
        assert daemon.status()["origins"] == {str(tmp_path): "ok", str(missing): body.partition(": ")[2].strip()}
        assert daemon.metric("quiver_origins_unreadable") == 1
        missing.mkdir(parents=True)
        until(lambda: ready(daemon)[0] == 200)
        assert daemon.log.count("cannot be read") == 1
        until(lambda: daemon.log.count("can be read again") == 1)


@pytest.mark.parametrize("kind", ["a file", "closed"])
def test_a_folder_that_cannot_be_read_is_said(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"") if kind == "a file" else path.symlink_to(path)
    with Daemon(tmp_path / "node", origins=[path]) as daemon:
        status, body = ready(daemon)
        assert (status, body.count(f"origin {path}: ")) == (503, 1)


def test_a_missing_library_is_said_and_a_client_is_chosen_to_read_instead(tmp_path: Path, small: Files) -> None:
    (tmp_path / "no").mkdir()
    (tmp_path / "no" / "obstore.py").write_text("raise ImportError('no obstore')")
    environment = {"PYTHONPATH": str(tmp_path / "no")}
    with FreshDaemon(tmp_path / "node", origins=["s3://bucket/data"], environment=environment) as daemon:
        status, body = ready(daemon)
        assert status == 503
        assert "pip install 'quiver-cache[s3]'" in body
        assert "pip install" in daemon.status()["origins"]["s3://bucket/data"]
        files = rebased(small, "s3://bucket/data/", tmp_path / "remote.quiver")
        put_manifest(daemon, files)
        manifest = files.opened()
        statuses, _ = read(daemon, [manifest.shard_digest(0)], [(0, 0, 10)], manifest.digest, wait=20_000)
        assert statuses[0] is RangeStatus.UPLOAD


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("<Error><Code>InvalidAccessKeyId</Code></Error>", "InvalidAccessKeyId"),
        ("<Error><Code>AccessDenied</Code></Error>", None),  # may be allowed to get objects and not to list them
        ("", "credentials"),  # no credentials at all
    ],
)
def test_credentials_that_cannot_work_are_said(tmp_path: Path, answer: str, says: str | None) -> None:
    def refuse(connection: socket.socket, request: bytes) -> None:
        connection.sendall(ok(answer.encode(), "Content-Type: application/xml", status="403 Forbidden"))

    with HostileServer(refuse) as server:
        environment = {"AWS_ENDPOINT_URL": server.url, "AWS_REGION": "us-east-1", "AWS_METADATA_ENDPOINT": server.url}
        if answer:
            environment |= {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "hush"}
        with Daemon(tmp_path / "node", origins=["s3://bucket/data"], environment=environment) as daemon:
            status, body = ready(daemon)
            assert status == (503 if says else 200), body
            assert (says or "ok") in body
            assert "hush" not in body + daemon.log


def test_a_server_that_is_away_is_said_and_when_it_is_back(tmp_path: Path, small: Files) -> None:
    with counting_origin(small.folder) as origin:
        origin.status = 503
        with Daemon(tmp_path / "node", origins=[origin.url]) as daemon:
            status, body = ready(daemon)
            assert status == 503
            assert "the server answers with status 503" in body
            origin.status = None
            until(lambda: ready(daemon)[0] == 200)


def test_a_folder_that_goes_is_said_when_a_fill_fails_there(tmp_path: Path, small: Files) -> None:
    with Daemon(tmp_path / "node", origins=[small.folder]) as daemon:
        assert ready(daemon)[0] == 200
        small.folder.rename(tmp_path / "moved")
        with pytest.raises(QuiverError):
            read_all(small, daemon)
        until(lambda: ready(daemon)[0] == 503)


def test_clients_are_told_once_and_status_says_it(
    tmp_path: Path, small: Files, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = small.folder.rename(tmp_path / "moved")
    with Daemon(tmp_path / "node", origins=[small.folder]) as daemon, caplog.at_level(logging.WARNING):
        for _ in range(2):
            with pytest.raises(QuiverError):
                read_all(small, daemon)
        told = [record.getMessage() for record in caplog.records if "caches nothing" in record.getMessage()]
        assert len(told) == 2, "once for each dataset that was opened"
        assert f"there is no folder {small.folder}" in told[0]
        assert run(["status", "--cache", daemon.url]) == 0
        said = capsys.readouterr().out
        assert "origin failed" in said
        assert f"origin {small.folder}: there is no folder" in said
        assert run(["status", "--cache", daemon.url, "--json"]) == 0
        member = json.loads(capsys.readouterr().out)["members"][0]
        assert "there is no folder" in member["origins"][str(small.folder)]
        moved.rename(small.folder)
        until(lambda: ready(daemon)[0] == 200)


@pytest.mark.fault("C4")
def test_a_disk_that_is_full_is_said_and_when_it_has_room_again(tmp_path: Path, small: Files) -> None:
    with Daemon(tmp_path / "node", origins=[small.folder]) as daemon:
        read_all(small, daemon).close()
        assert daemon.process is not None
        other = make_files(tmp_path / "other", random_files(9, seed=2))
        hard = resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE)[1]
        put_manifest(daemon, other)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (1000, hard))
        data = b"x" * 5000
        status, body, _ = daemon.ask("PUT", "/v1/shards/" + "a" * 64, data)
        assert status == 503, body
        status, body = map(str, ready(daemon))
        assert status == "503"
        assert "disk: cannot write" in body
        assert "disk: cannot write" not in daemon.status()["origins"].values()
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        until(lambda: ready(daemon)[0] == 200)  # though nobody writes anything
        assert daemon.status()["disk"] == "ok"
        assert daemon.metric("quiver_disk_writable") == 1
        assert not list((tmp_path / "node" / "tmp").iterdir())


def put_manifest(daemon: Daemon, files: Files) -> None:
    body = files.manifest.read_bytes()
    assert daemon.ask("PUT", f"/v1/manifests/{files.opened().digest}", body)[0] == 201


def test_an_upload_in_place_of_a_fill_is_no_failure(tmp_path: Path, small: Files) -> None:
    with Daemon(tmp_path / "node") as daemon:
        dataset = read_all(small, daemon)
        assert dataset.stats()["uploads"] == small.opened().shard_count
        dataset.close()
        assert failures(daemon) == ""
        assert "WARNING" not in daemon.log


def test_a_hundred_lost_objects_are_a_few_lines(tmp_path: Path) -> None:
    files = make_files(tmp_path, random_files(120, seed=3, low=8_000, high=9_000), shard_bytes="16KiB")
    manifest = files.opened()
    for path in files.folder.rglob("*.png"):
        path.unlink()
    with Daemon(tmp_path / "node", origins=[files.folder]) as daemon:
        dataset = Dataset(files.manifest, daemon.url)
        with pytest.raises(QuiverError):
            dataset.__getitems__(list(range(len(dataset))))
        dataset.close()
        assert manifest.shard_count > 60
        until(lambda: "origin_changed" in failures(daemon))
        assert 0 < daemon.log.count("WARNING") <= 10, daemon.log
