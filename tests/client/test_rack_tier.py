"""What the rack tier asks of which daemon: requests of bounded size, and daemons that did not respond left alone."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from quiver.peer import PeerClient
from quiver.plan import plan_shards
from quiver.ring import Member, Ring
from quiver.store import Kind
from quiver.store.inventory import file_of
from quiver_client import Dataset
from quiver_client.config import parse_cache
from quiver_client.rack import members as members_module
from quiver_client.rack import tier as tier_module
from quiver_client.rack.members import Members
from quiver_client.session import Session
from quiver_client.stats import Stats
from tests.support.daemon import Daemon
from tests.support.data import Files, make_files, random_files
from tests.support.servers import HostileServer, ok

pytestmark = pytest.mark.usefixtures("patient_reads")

Make = Callable[..., Dataset]
URL = "http://node:7717"


@pytest.fixture
def small(tmp_path: Path) -> Files:
    return make_files(tmp_path / "small", random_files(60, seed=1), shard_bytes="64KiB")


@pytest.fixture
def served(small: Files, tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path / "data", origins=[small.folder]) as daemon:
        yield daemon


@pytest.mark.parametrize(("limit", "value"), [("READ_BYTES_MAX", 50_000), ("READ_BYTES_MAX", 1), ("RANGES_MAX", 7)])
def test_a_batch_too_large_for_one_request_is_read_by_several(
    dataset: Make, small: Files, served: Daemon, limit: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, limit, value)
    made = dataset(small.manifest, served.url, fields=["image", "__key__"])
    rows = [*range(59, -1, -1), 3, 3]
    for row, sample in zip(rows, made.__getitems__(rows), strict=True):
        assert sample["__key__"] == made.manifest.key(row)
        assert sample["image"] == small.content[sample["__key__"]]
    assert made.stats()["samples_rack"] == len(rows)


@pytest.fixture
def members(small: Files, monkeypatch: pytest.MonkeyPatch) -> Members:
    """Of a daemon that is probed at once when it does not respond."""
    monkeypatch.setattr(members_module, "UNRESPONSIVE_SECONDS", 0.0)
    return Members(small.opened(), [URL], Stats())


def test_a_daemon_that_does_not_respond_is_left_alone_until_it_answers(members: Members) -> None:
    assert not members.is_unresponsive(URL)
    members.mark_unresponsive(URL)
    members.mark_unresponsive(URL)  # by another thread, which met the same failure
    assert [members.is_unresponsive(URL) for _ in range(3)] == [True] * 3, "a predicate changes nothing"
    assert members.health.failures(URL) == 1
    members.answered(URL)
    assert not members.is_unresponsive(URL)


def test_a_daemon_that_does_not_respond_is_probed_by_one_thread_at_a_time(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    members.mark_unresponsive(URL)
    assert members.begin_probes() == [URL]
    assert members.begin_probes() == []
    monkeypatch.setattr(members_module, "is_alive", lambda url, seconds: False)
    members.probe(URL)
    assert members.is_unresponsive(URL)
    assert members.begin_probes() == [URL]
    monkeypatch.setattr(members_module, "is_alive", lambda url, seconds: True)
    members.probe(URL)
    assert not members.is_unresponsive(URL)
    assert members.begin_probes() == []


def test_a_rack_whose_addresses_change_keeps_clients_of_its_present_members_alone(members: Members) -> None:
    members.peer(URL)
    for number in range(20):
        url = f"http://node{number}:7717"
        members._set_ring(Ring.of("r", [Member("b", url)], 1))
        members.peer(url)
        assert {made for made, _ in members._peers} == {URL, url}


def test_a_read_that_is_under_way_while_a_rack_is_closed_may_still_make_a_client(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    members.peer(URL)
    monkeypatch.setattr(PeerClient, "close", lambda peer: members.peer("http://other:7717"))
    members.close()


VERBS = ("/v1/stream", "/v1/fill", "/v1/forgo", "/v1/recheck")


@pytest.fixture
def old(served: Daemon) -> Iterator[HostileServer]:
    """A daemon that has ``POST /v1/read`` and none of the verbs that came later."""

    def answer(connection: socket.socket, request: bytes) -> None:
        head, _, body = request.partition(b"\r\n\r\n")
        method, path, _ = head.decode().splitlines()[0].split(" ")
        if path in VERBS:
            connection.sendall(ok(b"", status="404 Not Found"))
            return
        status, told, _ = served.ask(method, path, body)
        connection.sendall(ok(told.replace(served.url.encode(), server.url.encode()), status=f"{status} Told"))

    with HostileServer(answer) as server:
        yield server


def test_a_daemon_without_a_verb_to_fill_fills_what_nothing_is_read_of(
    small: Files, served: Daemon, old: HostileServer
) -> None:
    manifest = small.opened()
    session = Session(manifest, parse_cache(old.url), "fast", introduce=True)
    try:
        assert session.fill(plan_shards(manifest, np.arange(manifest.shard_count))) == {}
        assert served.status()["fills"] == manifest.shard_count
    finally:
        session.close()


def test_a_daemon_without_a_verb_to_recheck_is_told_by_the_read(
    dataset: Make, small: Files, served: Daemon, old: HostileServer
) -> None:
    made = dataset(small.manifest, old.url)
    rows = range(len(small.content))
    made.__getitems__(rows)
    path = file_of(served.data_dir, Kind.SHARD, made.manifest.shard_digest(0))
    path.write_bytes(bytes(1000) + path.read_bytes()[1000:])
    for _ in range(2):
        assert [sample["image"] for sample in made.__getitems__(rows)] == [
            small.content[made.manifest.key(row)] for row in rows
        ]
    assert served.metric("quiver_corruptions_total") == 1
    stats = made.stats()
    assert stats["samples_rack"] == 3 * len(rows), "the shard was verified, discarded and filled again"
    assert stats["fallbacks"] == 0
