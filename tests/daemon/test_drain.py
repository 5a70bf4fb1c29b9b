"""Draining: what only a daemon holds goes to its next owners, by real daemons in a rack kept in etcd."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from quiver_client.cli.drain import command as drain
from tests.daemon.test_rack import whole_dataset
from tests.support.daemon import Daemon
from tests.support.data import Files, make_files, random_files, rebased
from tests.support.etcd import Etcd
from tests.support.servers import CountingOrigin, counting_origin
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("patient_reads")

NODES = "abc"


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with Etcd() as running:
        yield running


@pytest.fixture
def local(tmp_path: Path) -> Files:
    return make_files(tmp_path, random_files(120, seed=1), shard_bytes="64KiB")


@contextlib.contextmanager
def rack(etcd: Etcd, where: Path, origin: CountingOrigin, *flags: str, **more: Any) -> Iterator[dict[str, Daemon]]:
    """Run three daemons whose ring etcd keeps."""
    with contextlib.ExitStack() as stack:
        daemons = {}
        for name in NODES:
            daemon = Daemon(
                *(where / name, "--etcd", etcd.url, "--rack", where.name, "--node-id", name, *flags),
                origins=[origin.url],
                **more,
            )
            daemons[name] = stack.enter_context(daemon)
        for daemon in daemons.values():
            until(lambda daemon=daemon: len(daemon.json("/v1/ring")["members"]) == len(NODES))
        yield daemons


def cache_of(daemons: dict[str, Daemon]) -> str:
    return ",".join(daemon.url for daemon in daemons.values())


def drained(daemons: dict[str, Daemon], name: str, *more: str) -> dict[str, Any]:
    """Run ``quiver drain``; return what it says."""
    told = CliRunner().invoke(drain, [name, "--cache", cache_of(daemons), "--json", *more], catch_exceptions=False)
    status: dict[str, Any] = json.loads(told.stdout)
    return status


def test_what_a_drained_daemon_held_is_not_read_from_the_origin_again(etcd: Etcd, tmp_path: Path, local: Files) -> None:
    with counting_origin(local.folder) as origin:
        remote = rebased(local, origin.url, tmp_path / "remote.quiver")
        with rack(etcd, tmp_path / "drain1", origin) as daemons:
            whole_dataset(remote, cache_of(daemons)).close()
            held = {name: daemon.status()["resident_bytes"] for name, daemon in daemons.items()}
            read = origin.bytes_sent
            status = drained(daemons, "b", "--deadline", "60s")
            assert status["state"] == "drained"
            assert status["handed_over_bytes"] == status["held_bytes"] > 0
            assert set(status["receivers"]) <= {"a", "c"}
            assert daemons["b"].status()["state"] == "draining"
            assert daemons["b"].stop() == 0
            whole_dataset(remote, cache_of(daemons)).close()
            assert origin.bytes_sent == read, f"of {held}"
