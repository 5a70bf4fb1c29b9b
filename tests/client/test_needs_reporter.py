"""What tells a consumer's needs in the background: when, until when, and what it makes of the answers."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quiver.errors import BadRequest, Unavailable
from quiver.residency import Report
from quiver.residency.messages import NeedsAnswer, NeedsReport, NeedsStatus
from quiver.ring import Member, Ring
from quiver_client import needs_reporter as watch_module
from quiver_client import thread_pool as pool_module
from quiver_client.needs_reporter import NeedsReporter
from quiver_client.rack import needs as rack_module
from quiver_client.rack.needs import RackNeeds
from quiver_client.stats import Stats
from quiver_client.thread_pool import ThreadPool
from tests.support.data import Files
from tests.support.residency import Clock, Rack, alive
from tests.support.waiting import until

NEVER = 3600.0


def a_report(left: int = 255, shards: int = 4) -> Report:
    return Report(b"c" * 16, np.full(shards, left, np.uint8), 0.0, 0.0, 10.0)


class Consumer:
    """Says what it is told to, and again after ``pause`` seconds."""

    def __init__(self, pause: float = NEVER) -> None:
        self.pause = pause
        self.said = 0

    def report(self) -> tuple[Report, float]:
        self.said += 1
        return a_report(), self.pause


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(watch_module, "SPACING_SECONDS", 0.001)
    yield
    until(lambda: not alive("quiver-needs"), what="the thread ends")


# -- NeedsReporter ----------------------------------------------------------------------------------------------------


def test_nothing_is_resident_until_something_answered() -> None:
    rack, consumer = Rack(4), Consumer()
    watch = NeedsReporter(4, rack, consumer.report)
    watch.first_answer(20)
    assert watch.view.resident.all()
    watch.close()
    assert rack.reports
    blocked = threading.Event()
    slow = Rack(4)
    slow.report = lambda report, leaving=False: blocked.wait(20) and slow.seen  # type: ignore[method-assign,assignment,misc]
    watch = NeedsReporter(4, slow, consumer.report)
    watch.first_answer(0.01)
    assert not watch.view.resident.any()
    blocked.set()
    watch.close()


def test_an_answer_says_what_is_resident_and_how_many_others_need_it() -> None:
    rack, consumer = Rack(4, resident=False), Consumer()
    rack.seen[:] = [0, 1, 3, 255]
    watch = NeedsReporter(4, rack, consumer.report)
    watch.first_answer(20)
    assert watch.view.resident.tolist() == [False, True, True, True]
    assert watch.view.others.tolist() == [0, 0, 2, 254]
    watch.close()


def test_arrivals_are_counted_and_keep_their_order() -> None:
    rack, consumer = Rack(4, resident=False), Consumer()
    watch = NeedsReporter(4, rack, consumer.report)
    watch.first_answer(20)
    assert watch.arrivals == 0
    seen = []
    for shards in ([2], [2, 0], [0], [0, 2, 3]):
        before = watch.view
        rack.holds(shards)
        while watch.view.resident.tolist() != [shard in shards for shard in range(4)]:
            watch.wait(20)
        seen.append((watch.arrivals, watch.view.arrived.tolist()))
        assert before.resident.tolist() != watch.view.resident.tolist()  # replaced, and not written to
    assert seen == [(1, [0, 0, 1, 0]), (2, [2, 0, 1, 0]), (2, [2, 0, 1, 0]), (3, [2, 0, 3, 3])]
    watch.close()


def test_it_reports_when_it_said_it_would_and_sooner_if_nudged() -> None:
    rack, often, seldom = Rack(4), Consumer(pause=0.0), Consumer()
    watch = NeedsReporter(4, rack, often.report)
    until(lambda: often.said >= 5)
    watch.close()
    rack = Rack(4)
    watch = NeedsReporter(4, rack, seldom.report)
    watch.first_answer(20)
    for said in (1, 2, 3):
        until(lambda said=said: seldom.said == said)  # type: ignore[misc]
        watch.nudge()
    until(lambda: seldom.said == 4)
    watch.close()


def test_who_waits_hears_of_the_next_answer() -> None:
    rack, consumer = Rack(4), Consumer()
    watch = NeedsReporter(4, rack, consumer.report)
    watch.first_answer(20)
    told = len(rack.reports)
    watch.wait(20)
    assert len(rack.reports) > told
    watch.close()


def test_closing_takes_the_needs_back_once_and_wakes_who_waits() -> None:
    rack, consumer = Rack(4), Consumer()
    watch = NeedsReporter(4, rack, consumer.report)
    watch.first_answer(20)
    watch.close()
    watch.close()
    assert rack.left
    assert rack.closed
    watch.wait(NEVER)
    watch.first_answer(NEVER)


def test_it_ends_with_its_consumer() -> None:
    rack, consumer = Rack(4), Consumer(pause=0.0)
    NeedsReporter(4, rack, consumer.report)
    until(lambda: rack.reports)
    del consumer
    gc.collect()
    until(lambda: rack.closed)
    assert rack.left


def test_who_never_said_anything_has_nothing_to_take_back() -> None:
    rack, consumer = Rack(4), Consumer()
    method = consumer.report
    del consumer
    watch = NeedsReporter(4, rack, method)
    del method
    watch.close()
    assert rack.closed


@pytest.mark.parametrize("error", [RuntimeError("a bug"), OSError("no descriptors"), Unavailable("x", "is away")])
def test_a_report_that_fails_is_tried_again_and_what_was_seen_counts_for_a_moment(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch_module, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(watch_module, "STALE_SECONDS", NEVER)
    rack, consumer = Rack(4), Consumer(pause=0.0)
    watch = NeedsReporter(4, rack, consumer.report)
    watch.first_answer(20)
    told = rack.report
    failures: list[Exception] = []

    def fail(report: Report, *, leaving: bool = False) -> Any:
        failures.append(error)
        raise error

    rack.report = fail  # type: ignore[method-assign]
    until(lambda: len(failures) > 5)
    assert watch.view.resident.all()
    monkeypatch.setattr(watch_module, "STALE_SECONDS", 0.0)
    until(lambda: not watch.view.resident.any(), what="nobody knows any more")
    rack.report = told  # type: ignore[method-assign]
    until(lambda: watch.view.resident[0])
    assert watch.arrivals == 2
    watch.close()
    assert rack.left
    warnings = [record.getMessage() for record in caplog.records if record.name == "quiver_client"]
    assert len(warnings) == 1, "once in a while"
    assert str(error) in warnings[0]


def test_a_consumer_that_fails_to_say_what_it_needs_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch_module, "RETRY_SECONDS", 0.01)

    class Clumsy(Consumer):
        def report(self) -> tuple[Report, float]:
            if super().report()[0] and self.said < 3:
                raise ValueError("not yet")
            return a_report(), self.pause

    rack, consumer = Rack(4), Clumsy()
    watch = NeedsReporter(4, rack, consumer.report)
    watch.first_answer(20)
    assert consumer.said == 3
    watch.close()
    assert rack.left


def test_leaving_that_fails_ends_the_thread_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    rack, consumer = Rack(4), Consumer()
    watch = NeedsReporter(4, rack, consumer.report)
    watch.first_answer(20)

    def fail(report: Report, *, leaving: bool = False) -> Any:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    rack.report = fail  # type: ignore[method-assign]
    watch.close()
    assert "RuntimeError" in caplog.text


# -- RackNeeds --------------------------------------------------------------------------------------------------------


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
    """The daemons of a rack, as ``tiers.members`` knows them."""

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
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rack_module, "time", clock)
    return clock


def needs_of(files: Files, members: Members) -> tuple[RackNeeds, Stats]:
    stats = Stats()
    manifest: Any = SimpleNamespace(digest=files.opened().digest, shard_count=4)
    manifest.tables = SimpleNamespace(shard_digests=files.opened().tables.shard_digests[:4])
    return RackNeeds(manifest, members, lambda: None, stats), stats  # type: ignore[arg-type,return-value]


def test_the_answers_of_all_daemons_are_put_together(files: Files, clock: Clock) -> None:
    needs, _ = needs_of(files, Members(a=Peer([0, 1, 3, 0]), b=Peer([0, 2, 1, 1])))
    assert needs.report(a_report()).tolist() == [0, 2, 3, 1]
    needs.close()


def test_a_daemon_that_is_slow_holds_nobody_up_and_counts_for_a_while(
    files: Files, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rack_module, "ANSWER_SECONDS", 0.05)
    slow, quick = Peer([1, 0, 0, 0]), Peer([0, 1, 0, 0])
    needs, _ = needs_of(files, Members(slow=slow, quick=quick))
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
    needs, _ = needs_of(files, members)
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
    needs, _ = needs_of(files, members)
    assert needs.report(a_report()).tolist() == [0, 1, 0, 0]
    assert not members.down
    needs.close()


def test_a_daemon_without_the_manifest_gets_it_and_is_asked_again(files: Files, clock: Clock) -> None:
    peer = Peer([1, 0, 0, 1])
    peer.statuses = [NeedsStatus.NO_MANIFEST]
    needs, _ = needs_of(files, Members(peer=peer))
    assert needs.report(a_report()).tolist() == [1, 0, 0, 1]
    assert (peer.manifests, len(peer.told)) == (1, 2)
    needs.close()


def test_an_answer_about_other_shards_is_left_out(files: Files, clock: Clock) -> None:
    needs, _ = needs_of(files, Members(peer=Peer([1, 1]), other=Peer([0, 1, 0, 0])))
    assert needs.report(a_report()).tolist() == [0, 1, 0, 0]
    needs.close()


def test_leaving_tells_every_daemon_that_answers(files: Files, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, down = Peer([1, 0, 0, 0]), Peer([0, 1, 0, 0]), Peer([0, 0, 1, 0])
    members = Members(a=a, down=down, b=b)
    members.down = {"down"}
    needs, _ = needs_of(files, members)
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


def test_nothing_waits_for_daemons_that_stand_still(
    files: Files, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = {f"stopped{number}": Peer([1, 0, 0, 0]) for number in range(rack_module.TELLERS - 2)}
    there = Peer([0, 1, 0, 0])
    needs, _ = needs_of(files, Members(**stopped, there=there))
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
    assert time.monotonic() - begun < 4
    assert there.told[-1].leaving
    for peer in stopped.values():
        peer.gate.set()


def test_a_ring_that_does_not_come_holds_nobody_up(files: Files, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rack_module, "ANSWER_SECONDS", 20.0)
    members = Members(a=Peer([1, 0, 0, 0]))
    needs, _ = needs_of(files, members)
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


# -- ThreadPool -------------------------------------------------------------------------------------------------------


def test_a_pool_does_what_it_is_given_by_no_more_threads_than_it_may_have() -> None:
    pool = ThreadPool(3, "quiver-pooled")
    assert list(pool.map(lambda number: number * 2, range(50))) == list(range(0, 100, 2))
    assert 1 <= len(alive("quiver-pooled")) <= 3
    failing = pool.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing.result(20)
    pool.shutdown()
    assert not alive("quiver-pooled")
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(print)


def test_a_pool_that_nobody_has_any_more_ends_its_threads() -> None:
    pool = ThreadPool(2, "quiver-pooled")
    assert pool.submit(int).result(20) == 0
    del pool
    until(lambda: not alive("quiver-pooled"))


def test_shutting_a_pool_down_waits_a_moment_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "END_SECONDS", 0.05)
    pool, gate = ThreadPool(1, "quiver-pooled"), threading.Event()
    wedged, waiting = pool.submit(gate.wait, 20), pool.submit(int)
    until(wedged.running)
    pool.shutdown(cancel_futures=True)
    assert wedged.running()
    assert waiting.cancelled()
    gate.set()
    until(lambda: not alive("quiver-pooled"))


def test_the_end_of_the_process_waits_for_no_thread_of_a_pool() -> None:
    script = """
        import threading
        from quiver_client.thread_pool import ThreadPool
        pools = [ThreadPool(2, "stuck") for _ in range(8)]
        for pool in pools:
            for _ in range(3):
                pool.submit(threading.Event().wait)
    """
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, timeout=60, check=True)
    assert time.monotonic() - begun < 10
    assert done.stderr == b""
