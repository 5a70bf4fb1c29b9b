"""Readers that report nothing, as a daemon sees them: whose they are, how fast, once each, and bounded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.digest import Digest
from quiver.domain import SINGLE, Domain, domain_named
from quiver.identity import Identity
from quiver.introduction import READER_BYTES, Introduction
from quiver.residency import ConsumerReport, Needs
from quiver.ring import Member, Ring
from quiver.store import Store
from quiver.transport.handoff import HandoffClient
from quiver_cacheserver.dataset_names import DatasetNames
from quiver_cacheserver.names import consumer_in, name_in
from quiver_cacheserver.node import Node
from quiver_cacheserver.rack.registry import StaticRegistry
from quiver_cacheserver.residency import readers as readers_module
from quiver_cacheserver.residency.readers import (
    FORGET_SECONDS,
    WINDOW_SECONDS,
    ReadBy,
    Readers,
    SeenReader,
    own_share,
)
from quiver_cacheserver.serving.unix_socket import Handoff, bound
from tests.support.data import Files

A, B = (Digest(bytes([letter]) * 32) for letter in b"AB")


def by(reader: int = 0, job: str = "", group: str = "", client: str = "10.0.0.1", **more: Any) -> ReadBy:
    """A connection that introduced itself, or for reader 0 one that did not."""
    said = Introduction(reader.to_bytes(READER_BYTES, "big"), Identity(job, group), "train") if reader else None
    return ReadBy(client, introduction=said, **more)


class Board:
    """The readers of a daemon that owns a part of every dataset."""

    def __init__(self, share: float = 1.0) -> None:
        self.needs = Needs()
        self.names = DatasetNames()
        self.share = share
        self.readers = Readers(self.needs, self.names, lambda *_: self.share)
        self.now = 0.0

    def read(self, who: list[ReadBy], rate: float, seconds: float, manifest: Digest = A) -> None:
        """Each reads so many bytes per second, in batches four times a second, while the daemon looks now and then."""
        for _ in range(int(seconds * 4)):
            self.now += 0.25
            for each in who:
                self.readers.read(each, manifest, int(rate / 4), self.now)
            self.readers.seen(self.now)

    def report(self, consumer: bytes, reader: bytes, client: str, domain: Domain = SINGLE) -> None:
        name = name_in(domain, A)
        if not self.needs.has_dataset(name):
            one = np.ones(1)
            self.needs.add_dataset(name, np.zeros((1, 32), np.uint8), one, one > 1, one > 0)
        told = ConsumerReport(consumer_in(domain, consumer), np.ones(1, np.uint8), 1.0, 0.0, 60.0, reader=reader)
        assert self.needs.report(name, told, self.now, client=client)

    def seen(self) -> list[SeenReader]:
        return self.readers.seen(self.now)


@pytest.fixture
def board() -> Board:
    return Board()


def test_what_a_job_reads_is_seen_with_its_name_and_rate(board: Board) -> None:
    board.read([by(1, "resnet")], 1000.0, 5.0)
    [it] = board.seen()
    assert (it.dataset, it.manifest, it.identity, it.name) == (A, A, Identity("resnet"), "resnet")
    assert it.throughput == pytest.approx(1000.0, rel=0.1)
    assert it.attained_bytes == pytest.approx(5000.0)
    assert board.names.shown(A) == "train"


def test_a_reader_that_is_slowed_down_is_known_to_be_faster(board: Board) -> None:
    board.read([by(1, "resnet")], 1000.0, 10.0)
    board.read([by(1, "resnet")], 200.0, 30.0)
    [it] = board.seen()
    assert it.throughput == pytest.approx(200.0, rel=0.1)
    assert it.rate == pytest.approx(1000.0, rel=0.1)


def test_a_daemon_that_owns_a_third_sees_a_third() -> None:
    board = Board(share=1 / 3)
    board.read([by(1, "resnet")], 1000.0, 5.0)
    [it] = board.seen()
    assert it.throughput == pytest.approx(3000.0, rel=0.1)
    assert it.attained_bytes == pytest.approx(15000.0)


def test_what_was_read_before_a_member_left_or_joined_stays_what_it_was() -> None:
    board = Board(share=1 / 3)
    board.read([by(1, "resnet")], 1000.0, 5.0)
    assert board.seen()[0].attained_bytes == pytest.approx(15000.0)
    board.share = 0.0  # of a ring that this daemon is not in, for a moment
    board.read([by(1, "resnet")], 1000.0, 1.0)
    board.share = 1 / 2
    board.read([by(1, "resnet")], 1000.0, 4.0)
    assert board.seen()[0].attained_bytes == pytest.approx(15000.0 + 2 * 5000.0)
    board.share = 1.0
    board.now += 1.0
    assert board.seen()[0].attained_bytes == pytest.approx(25000.0)


def test_the_ranks_of_a_job_are_one_reader_and_two_jobs_are_two(board: Board) -> None:
    ranks = [by(number, "resnet", client=f"10.0.0.{number}") for number in range(1, 5)]
    board.read([*ranks, by(9, "bert")], 100.0, 5.0)
    found = {it.name: it for it in board.seen()}
    assert {name: it.processes for name, it in found.items()} == {"resnet": 4, "bert": 1}
    assert found["resnet"].throughput == pytest.approx(400.0, rel=0.1)


def test_jobs_without_a_name_are_not_taken_for_one(board: Board) -> None:
    board.read([by(1), by(2), by(client="10.0.0.7"), by(client="10.0.0.8")], 100.0, 3.0)
    found = board.seen()
    assert len(found) == len({it.name for it in found}) == 4
    assert {it.identity for it in found} == {Identity()}


def test_trials_of_a_sweep_are_readers_of_one_group(board: Board) -> None:
    board.read([by(1, "trial 1", "sweep"), by(2, "trial 2", "sweep")], 100.0, 3.0)
    assert [it.identity for it in board.seen()] == [Identity("trial 1", "sweep"), Identity("trial 2", "sweep")]


def test_who_reports_needs_is_not_counted_a_second_time(board: Board) -> None:
    reader = (1).to_bytes(READER_BYTES, "big")
    board.report(b"consumer........", reader, "10.0.0.1")
    board.read([by(1, "resnet"), by(2, "stock")], 100.0, 5.0)
    assert [it.name for it in board.seen()] == ["stock"], "of the same host, and of another opening"
    board.needs.leave(b"consumer........")
    assert [it.name for it in board.seen()] == ["stock"], "what it read while it reported stays left out"
    board.read([by(1, "resnet")], 100.0, 3.0)
    assert {it.name for it in board.seen()} == {"resnet", "stock"}, "now it reads with a stock loader"


def test_a_rank_that_follows_another_is_left_out_as_long_as_somebody_reports(board: Board) -> None:
    follower = ReadBy("10.0.0.2", introduction=Introduction(b"f" * READER_BYTES, Identity("resnet"), follows=True))
    board.report(b"consumer........", b"l" * READER_BYTES, "10.0.0.1")
    board.read([follower], 100.0, 5.0)
    assert not board.seen()
    board.needs.leave(b"consumer........")
    board.needs.forget_unused()
    board.read([follower], 100.0, 5.0)
    assert [it.name for it in board.seen()] == ["resnet"]


def test_forked_trials_that_say_their_own_names_are_readers_of_their_own(board: Board) -> None:
    board.read([by(1, "trial 1"), by(1, "trial 2")], 100.0, 3.0)
    assert [it.name for it in board.seen()] == ["trial 1", "trial 2"]


def test_of_an_older_client_that_reports_no_read_of_its_host_counts(board: Board) -> None:
    board.report(b"consumer........", b"", "10.0.0.1")
    board.read([by(client="10.0.0.1"), by(client="10.0.0.2")], 100.0, 3.0)
    [it] = board.seen()
    assert "10.0.0.2" in it.name


def test_a_tokens_tenant_counts_whatever_is_said(board: Board) -> None:
    said = Introduction(b"r" * READER_BYTES, Identity("resnet", "", "the lab next door"))
    board.read([ReadBy("tenant lab", domain_named("lab"), "lab", said)], 100.0, 3.0)
    [it] = board.seen()
    assert it.identity == Identity("resnet", "", "lab")
    assert it.dataset == name_in(domain_named("lab"), A)


def test_a_job_of_one_domain_says_nothing_of_another_domains(board: Board) -> None:
    alice, bob = domain_named("alice"), domain_named("bob")
    reader = (1).to_bytes(READER_BYTES, "big")
    board.report(b"consumer........", reader, "tenant alice", alice)
    board.read([by(1, "x", client="tenant bob", domain=bob, tenant="bob")], 100.0, 3.0)
    assert [it.identity.tenant for it in board.seen()] == ["bob"], "alice cannot hide bob's reads by naming his reader"


def test_who_stops_is_no_longer_seen_and_then_forgotten(board: Board) -> None:
    board.read([by(1, "resnet")], 100.0, 5.0)
    for _ in range(int(WINDOW_SECONDS) + 2):
        board.now += 1.0
        found = board.seen()
    assert not found
    board.read([by(1, "resnet")], 100.0, 3.0)
    [it] = board.seen()
    assert it.attained_bytes == pytest.approx(800.0), "with what it read before its pause"
    board.now += FORGET_SECONDS + 1
    board.seen()
    assert len(board.readers) == 0


async def test_a_stock_reader_takes_part_in_the_allocation_as_an_ordered_one(files: Files, tmp_path: Path) -> None:
    store = await asyncio.to_thread(Store.open, tmp_path / "store", 1 << 24, shared=False)
    node = Node("0", store, StaticRegistry("r", Member("a", "http://a:7717")), [])
    manifest, now = files.opened(), 0.0
    node.manifests.opened.add(manifest.digest, manifest)
    for _ in range(40):
        now += 0.25
        node.readers.read(by(1, "resnet", "sweep"), manifest.digest, 1000, now)
        problem, names = node.allocator.problem(now)
    [dataset] = problem.datasets
    [reader] = dataset.readers
    assert (dataset.name, names) == ("train", {manifest.digest: "train"})
    assert (reader.name, reader.ordered) == ("sweep", True)
    assert reader.rate >= 4000.0
    node.allocator.take(node.allocator.solve(problem, names, now))
    assert node.allocator.division() == {}, "nobody reports, so nothing is divided"
    await asyncio.to_thread(node.close)


async def test_what_is_read_by_mapped_files_is_told_over_the_socket(files: Files, tmp_path: Path) -> None:
    store = await asyncio.to_thread(Store.open, tmp_path / "store", 1 << 24, shared=False)
    node = Node("0", store, StaticRegistry("r", Member("a", "http://a:7717")), [])
    digest, said = files.opened().digest, Introduction(b"r" * READER_BYTES, Identity("resnet"), "train")

    def read_and_tell() -> None:
        for introduction in (said.encode(), "nonsense", ""):  # the last as an older client
            client = HandoffClient(str(tmp_path / "s"), answer_seconds=20, introduction=introduction)
            client.read(digest, 1000)
            client.read(digest, 500)
            assert client.held([]) == []
            client.close()

    with bound(str(tmp_path / "s")) as listener:
        assert listener is not None
        async with Handoff(node, listener):
            await asyncio.to_thread(read_and_tell)
    counted = {it.by.identity.job: it.bytes for it in node.readers._counted.values()}
    assert counted == {"resnet": 1500, "": 3000}
    await asyncio.to_thread(node.close)


def test_no_client_fills_the_table(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers_module, "READERS_PER_CLIENT_MAX", 10)
    monkeypatch.setattr(readers_module, "READERS_MAX", 25)
    board.readers.read(by(1, "honest", client="10.0.0.7"), A, 1000, 0.0)
    for number in range(2, 500):
        board.readers.read(by(number, "x", client="10.6.6.6"), A, 1, 0.0)
    assert len(board.readers) == 11
    for number in range(500, 600):
        board.readers.read(by(number, "x", client=f"10.6.6.{number}"), A, 1, 0.0)
    assert len(board.readers) == 25


def test_a_process_that_comes_by_two_accounts_is_counted_against_one_of_them(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the Unix socket and over the network, say; or its token changes."""
    monkeypatch.setattr(readers_module, "READERS_PER_CLIENT_MAX", 2)
    for number in range(1, 5):
        for client in ("user:1000", "10.0.0.1"):
            board.readers.read(by(number, client=client), A, 1000, board.now)
        assert len(board.readers) == 1
        board.now += FORGET_SECONDS + 1
        assert not board.seen()
        assert len(board.readers) == 0
    board.readers.read(by(5, client="user:1000"), A, 1000, board.now)
    assert len(board.readers) == 1


def test_a_daemons_share_is_that_of_the_shards_that_it_owns_first(files: Files) -> None:
    manifest = files.opened()
    members = [Member(f"n{number}", f"http://10.0.0.{number}:7717") for number in range(1, 4)]
    ring = Ring.of("r", members, 1)
    shares = [own_share(ring, member.id, manifest) for member in members]
    assert sum(shares) == pytest.approx(1.0)
    sizes, owners = manifest.tables.shard_sizes, ring.rank(manifest.tables.shard_digests, 1)[:, 0]
    assert shares[0] == pytest.approx(float(sizes[owners == 0].sum()) / float(sizes.sum()))
    assert own_share(ring, "n1", None) == pytest.approx(1 / 3), "by weight, where the manifest is not known"
    assert own_share(ring, "stranger", manifest) == own_share(ring, "stranger", None) == 0.0
