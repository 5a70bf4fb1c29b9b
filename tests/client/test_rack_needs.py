"""What a consumer needs, told to all daemons of a rack: which answers count, and that no daemon holds a report up."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quiver.errors import BadRequest, Unavailable
from quiver.residency import ConsumerReport
from quiver.residency.messages import NeedsAnswer, NeedsReport, NeedsStatus
from quiver.ring import Member, Ring
from quiver_client.rack import needs as rack_module
from quiver_client.rack.needs import RackNeeds
from quiver_client.rack.uploads import ShardUploads
from quiver_client.stats import Stats
from tests.support.data import Files
from tests.support.residency import Clock
from tests.support.waiting import until


def a_report(left: int = 255, shards: int = 4) -> ConsumerReport:
    return ConsumerReport(b"c" * 16, np.full(shards, left, np.uint8), 0.0, 0.0, 10.0)


class Peer:
    """A daemon that answers as it is told to."""

    def __init__(self, seen: list[int]) -> None:
        self.seen = np.array(seen, np.uint8)
        self.told: list[NeedsReport] = []
        self.statuses: list[NeedsStatus] = []
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.manifests = 0

    def needs(self, told: NeedsReport) -> NeedsAnswer:
        self.told.append(told)
        assert self.gate.wait(20)
        if self.error is not None:
            raise self.error
        status = self.statuses.pop(0) if self.statuses else NeedsStatus.TAKEN
        return NeedsAnswer(status, self.seen, ())


class Members:
    """The daemons of a rack, as ``rack.members`` knows them."""

    def __init__(self, **peers: Peer) -> None:
        self.peers = peers
        self.down: set[str] = set()
        self.reached = True

    def refresh(self) -> Ring | None:
        return Ring("rack", tuple(Member(url, url) for url in sorted(self.peers))) if self.reached else None

    def is_unresponsive(self, url: str) -> bool:
        return url in self.down

    def mark_unresponsive(self, url: str) -> None:
        self.down.add(url)

    def answered(self, url: str) -> None: ...

    def peer(self, url: str) -> Peer:
        return self.peers[url]

    def put_manifest(self, peer: Peer, manifest: Any) -> None:
        peer.manifests += 1


@pytest.fixture
def clock() -> Clock:
    return Clock()


def needs_of(files: Files, members: Members, clock: Clock) -> tuple[RackNeeds, Stats]:
    stats = Stats()
    manifest: Any = SimpleNamespace(digest=files.opened().digest, shard_count=4)
    manifest.tables = SimpleNamespace(shard_digests=files.opened().tables.shard_digests[:4])
    uploads = ShardUploads(manifest, lambda: pytest.fail("nothing is uploaded here"), stats)
    return RackNeeds(manifest, members, uploads, stats, clock.monotonic), stats  # type: ignore[arg-type]


def test_the_answers_of_all_daemons_are_put_together(files: Files, clock: Clock) -> None:
    needs, _ = needs_of(files, Members(a=Peer([0, 1, 3, 0]), b=Peer([0, 2, 1, 1])), clock)
    assert needs.report(a_report()).tolist() == [0, 2, 3, 1]
    needs.close()


def test_a_daemon_that_is_slow_holds_nobody_up_and_counts_for_a_while(
    files: Files, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rack_module, "ANSWER_SECONDS", 0.05)
    slow, quick = Peer([1, 0, 0, 0]), Peer([0, 1, 0, 0])
    needs, _ = needs_of(files, Members(slow=slow, quick=quick), clock)
    monkeypatch.setattr(rack_module, "ANSWER_SECONDS", 20.0)
    assert needs.report(a_report()).tolist() == [1, 1, 0, 0]
    monkeypatch.setattr(rack_module, "ANSWER_SECONDS", 0.05)
    slow.gate.clear()
    assert needs.report(a_report()).tolist() == [1, 1, 0, 0]
    clock.now += rack_module.STALE_SECONDS + 0.1
    asked = len(slow.told)
    until(lambda: needs.report(a_report()).tolist() == [0, 1, 0, 0])
    assert len(slow.told) == asked  # not asked again while it has not answered
    slow.gate.set()
    until(lambda: needs.report(a_report()).tolist() == [1, 1, 0, 0])
    needs.close()


def test_what_a_daemon_that_is_gone_held_does_not_count(files: Files, clock: Clock) -> None:
    gone, there = Peer([1, 0, 0, 0]), Peer([0, 1, 0, 0])
    members = Members(gone=gone, there=there)
    needs, _ = needs_of(files, members, clock)
    assert needs.report(a_report()).tolist() == [1, 1, 0, 0]
    assert [needs.orphaned] == [None]
    gone.error = Unavailable("gone", "connection refused")
    assert needs.report(a_report()).tolist() == [0, 1, 0, 0]
    assert members.down == {"gone"}
    ring = members.refresh()
    assert ring is not None
    owners = [ring.members[at].url for at in ring.rank(files.opened().tables.shard_digests[:4], 1)[:, 0]]
    assert needs.orphaned is not None  # what the one that is gone should bring in, nobody does
    assert needs.orphaned.tolist() == [owner == "gone" for owner in owners]
    asked = len(gone.told)
    needs.report(a_report())
    assert len(gone.told) == asked
    members.down, gone.error = set(), None
    assert needs.report(a_report()).tolist() == [1, 1, 0, 0]
    del members.peers["gone"]  # left the ring
    assert needs.report(a_report()).tolist() == [0, 1, 0, 0]
    members.reached = False
    assert needs.report(a_report()).tolist() == [0, 0, 0, 0]
    needs.close()


def test_a_daemon_that_refuses_is_not_taken_for_gone(files: Files, clock: Clock) -> None:
    old = Peer([1, 1, 1, 1])
    old.error = BadRequest("no such path")
    members = Members(old=old, new=Peer([0, 1, 0, 0]))
    needs, _ = needs_of(files, members, clock)
    assert needs.report(a_report()).tolist() == [0, 1, 0, 0]
    assert not members.down
    needs.close()


def test_a_daemon_without_the_manifest_gets_it_and_is_asked_again(files: Files, clock: Clock) -> None:
    peer = Peer([1, 0, 0, 1])
    peer.statuses = [NeedsStatus.NO_MANIFEST]
    needs, _ = needs_of(files, Members(peer=peer), clock)
    assert needs.report(a_report()).tolist() == [1, 0, 0, 1]
    assert (peer.manifests, len(peer.told)) == (1, 2)
    needs.close()


def test_an_answer_about_other_shards_is_left_out(files: Files, clock: Clock) -> None:
    needs, _ = needs_of(files, Members(peer=Peer([1, 1]), other=Peer([0, 1, 0, 0])), clock)
    assert needs.report(a_report()).tolist() == [0, 1, 0, 0]
    needs.close()


def test_leaving_tells_every_daemon_that_answers(files: Files, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, down = Peer([1, 0, 0, 0]), Peer([0, 1, 0, 0]), Peer([0, 0, 1, 0])
    members = Members(a=a, down=down, b=b)
    members.down = {"down"}
    needs, _ = needs_of(files, members, clock)
    needs.report(a_report(), leaving=True)
    assert not a.told, "who never said anything has nothing to take back"
    needs.report(a_report())
    monkeypatch.setattr(members, "refresh", lambda: pytest.fail("who leaves asks for no ring"))
    a.statuses = [NeedsStatus.NO_MANIFEST]
    needs.report(a_report(), leaving=True)
    assert [len(peer.told) for peer in (a, b, down)] == [2, 2, 0]
    assert a.told[1].leaving
    assert b.told[1].leaving
    assert a.manifests == 0  # who leaves introduces nothing
    needs.close()


def test_leaving_tells_a_daemon_that_may_only_be_busy(files: Files, clock: Clock) -> None:
    a, busy, gone = Peer([1, 0, 0, 0]), Peer([0, 1, 0, 0]), Peer([0, 0, 1, 0])
    members = Members(a=a, busy=busy, gone=gone)
    needs, _ = needs_of(files, members, clock)
    needs.report(a_report())
    gone.error = Unavailable("gone", "did not answer")
    needs.report(a_report())
    clock.now += a_report().lease_seconds / 2
    busy.error = Unavailable("busy", "did not answer in time, but read the report")
    needs.report(a_report())
    clock.now += a_report().lease_seconds / 2 + 0.1
    assert members.down == {"gone", "busy"}
    needs.report(a_report(), leaving=True)
    assert busy.told[-1].leaving
    assert not gone.told[-1].leaving, "its lease has expired by itself"
    needs.close()


def test_nothing_waits_for_daemons_that_stand_still(
    files: Files, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = {f"stopped{number}": Peer([1, 0, 0, 0]) for number in range(rack_module.REPORTS_AT_ONCE - 2)}
    there = Peer([0, 1, 0, 0])
    needs, _ = needs_of(files, Members(**stopped, there=there), clock)
    monkeypatch.setattr(rack_module, "ANSWER_SECONDS", 20.0)
    needs.report(a_report())
    monkeypatch.setattr(rack_module, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(rack_module, "LEAVE_SECONDS", 0.5)
    for peer in stopped.values():
        peer.gate.clear()
    needs.report(a_report())
    begun = time.monotonic()
    needs.report(a_report(), leaving=True)
    needs.close()
    assert time.monotonic() - begun < 15
    assert there.told[-1].leaving
    for peer in stopped.values():
        peer.gate.set()


def test_a_ring_that_does_not_come_holds_nobody_up(files: Files, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rack_module, "ANSWER_SECONDS", 20.0)
    members = Members(a=Peer([1, 0, 0, 0]))
    needs, _ = needs_of(files, members, clock)
    assert needs.report(a_report()).tolist() == [1, 0, 0, 0]
    ring, comes, asked = members.refresh(), threading.Event(), []
    monkeypatch.setattr(members, "refresh", lambda: asked.append(1) or (ring if comes.wait(20) else None))
    monkeypatch.setattr(rack_module, "ANSWER_SECONDS", 0.05)
    until(lambda: needs.report(a_report()).tolist() == [1, 0, 0, 0])
    assert needs.report(a_report()).tolist() == [1, 0, 0, 0], "the last ring stays"
    assert len(asked) == 1, "and it is not asked for twice at a time"
    comes.set()
    until(lambda: needs.report(a_report()).any() and len(asked) > 1)
    needs.close()
