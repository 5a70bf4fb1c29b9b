"""What tells a consumer's needs in the background: when, until when, and what it makes of the answers."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quiver.errors import Unavailable
from quiver.residency import ConsumerReport
from quiver_client import needs_reporter as watch_module
from quiver_client.needs_reporter import NeedsReporter
from tests.support.residency import Rack
from tests.support.threads import alive
from tests.support.waiting import until

NEVER = 3600.0


def a_report(left: int = 255, shards: int = 4) -> ConsumerReport:
    return ConsumerReport(b"c" * 16, np.full(shards, left, np.uint8), 0.0, 0.0, 10.0)


class Consumer:
    """Says what it is told to, and again after ``pause`` seconds."""

    def __init__(self, pause: float = NEVER) -> None:
        self.pause = pause
        self.said = 0

    def report(self) -> tuple[ConsumerReport, float]:
        self.said += 1
        return a_report(), self.pause


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(watch_module, "SPACING_SECONDS", 0.001)
    yield
    until(lambda: not alive("quiver-needs"), what="the thread ends")


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

    def fail(report: ConsumerReport, *, leaving: bool = False) -> Any:
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
        def report(self) -> tuple[ConsumerReport, float]:
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

    def fail(report: ConsumerReport, *, leaving: bool = False) -> Any:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    rack.report = fail  # type: ignore[method-assign]
    watch.close()
    assert "RuntimeError" in caplog.text
