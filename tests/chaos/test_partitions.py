"""A real partition: a daemon's machine loses its link while a job trains, and comes back."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.history import Client, Job
from tests.chaos.netns import Machines, why_not
from tests.chaos.validators import Expected, digests_are_right, epochs_are_exact, has_no_error, no_wait_exceeds
from tests.support.daemon import FreshDaemon
from tests.support.data import Files
from tests.support.waiting import until

pytestmark = pytest.mark.chaos
REASON = functools.cache(why_not)


class RemoteDaemon(FreshDaemon):
    """A daemon on a machine of its own."""

    def __init__(self, machines: Machines, number: int, where: Path, *flags: str, **more: Any) -> None:
        super().__init__(where, "--insecure", *flags, **more)
        listen = self._command.index("--listen") + 1
        self._command[listen] = f"{machines.address(number)}:7717"
        self._command = machines.inside(number, self._command)


@pytest.mark.fault("M1", "M5", "N2")
def test_a_machine_that_loses_its_link_costs_no_sample_and_serves_again_when_it_is_back(
    chaos_data: Files, tmp_path: Path, seed: int
) -> None:
    if REASON():
        pytest.skip(REASON())
    with Machines(3) as machines:
        urls = [f"http://{machines.address(number)}:7717" for number in range(3)]
        flags = ("--peers", ",".join(urls))
        daemons = [
            RemoteDaemon(machines, number, tmp_path / f"node{number}", *flags, origins=[chaos_data.folder])
            for number in range(3)
        ]
        try:
            for daemon in daemons:
                daemon.start()
            for daemon in daemons:
                daemon.wait_until_serving()
            job = Job("job", str(chaos_data.manifest), urls[0], pause_seconds=0.03, until_file=str(tmp_path / "over"))
            with Client(job, tmp_path) as client:
                until(lambda: client.samples() > 300, 60)
                served = daemons[1].metric("quiver_served_bytes_total")
                assert served > 0
                machines.cut(1)
                at = client.samples()
                until(lambda: client.samples() > at + 480, 60, "it trains on without it")
                machines.join(1)
                until(lambda: daemons[1].metric("quiver_served_bytes_total") > served, 90, "it serves again")
                (tmp_path / "over").touch()
                history = client.wait()
        finally:
            for daemon in daemons:
                daemon.kill()
        expected = Expected.of(chaos_data.opened(), chaos_data.content)
        digests_are_right(history, expected)
        epochs_are_exact([history], expected)
        has_no_error(history)
        no_wait_exceeds(history, 10)
        assert history.stats["fallbacks"] > 0, "the link was really lost"
