"""Which jobs are asked for probes, until when."""

from __future__ import annotations

import numpy as np

from quiver.domain import SINGLE, domain_named
from quiver.identity import Identity
from quiver.residency import ConsumerReport, Measured
from quiver_cacheserver.residency.probes import ASKED_SECONDS, ProbeRequests
from tests.support.residency import Clock


def report(job: str, series: int = 0) -> ConsumerReport:
    return ConsumerReport(
        bytes(16), np.zeros(1, np.uint8), 1.0, 1.0, 5.0, identity=Identity(job), measured=Measured(probe_series=series)
    )


def test_a_job_is_asked_until_a_series_has_ended_and_no_other_job_is() -> None:
    probes = ProbeRequests()
    assert not probes.answered(report("a"), SINGLE)
    probes.ask("a", None, 2)
    assert probes.answered(report("a", 2), SINGLE)
    assert probes.answered(report("a", 0), SINGLE)  # another rank of it
    assert not probes.answered(report("b"), SINGLE)
    assert not probes.answered(report("a", 3), SINGLE)
    assert not probes.answered(report("a", 2), SINGLE)


def test_a_request_expires() -> None:
    clock = Clock()
    probes = ProbeRequests(clock.monotonic)
    probes.ask("a", None, 0)
    clock.now += ASKED_SECONDS + 1
    assert not probes.answered(report("a"), SINGLE)


def test_a_request_of_one_sharing_domain_asks_no_job_of_another() -> None:
    probes, ours, theirs = ProbeRequests(), domain_named("ours"), domain_named("theirs")
    probes.ask("a", ours, 0)
    assert not probes.answered(report("a"), theirs)
    assert probes.answered(report("a"), ours)
