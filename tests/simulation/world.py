"""One seed: a rack, an origin, jobs and faults on one clock, run to the end and checked."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

from quiver.ring import Member, Ring
from quiver_client.loader import consumer as consumer_module
from quiver_client.loader import sampler as sampler_module
from quiver_client.loader.ledger import recording as recording_module
from quiver_client.loader.ledger.files import LedgerWriter
from quiver_client.loader.ledger.recording import Replay
from quiver_client.loader.loop_rate import LoopRate
from tests.simulation import faults
from tests.simulation.clock import START, Clock
from tests.simulation.daemon import Daemon
from tests.simulation.dataset import Data, data_of
from tests.simulation.etcd import Etcd
from tests.simulation.job import Around, Job
from tests.simulation.network import Network
from tests.simulation.oracle import Oracle, violated
from tests.simulation.origin import Origin
from tests.simulation.rank import SimulatedReporter
from tests.simulation.scenario import HORIZON_SECONDS, Fault, Scenario, drawn

# After the last fault: a batch waits for the cache at most 20 s (``draw_wait``), and for the origin after that.
STEP_SECONDS_MAX: Final = 12.0
AFTERWARDS_SECONDS: Final = 90.0
SETTLE_TTLS: Final = 2.5


@dataclass
class Outcome:
    """What a seed came to."""

    seed: int
    virtual_seconds: float = 0.0
    events: int = 0
    checked: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    slack: float = 0.0  # of the time that the jobs were given, what they took


class World:
    """Everything of one seed."""

    def __init__(self, seed: int, scenario: Scenario | None = None, *, trace: bool = False) -> None:
        self.seed, self._trace = seed, trace
        self.chance = random.Random(seed)
        self.scenario = scenario or drawn(self.chance)
        self.clock = Clock()
        self.network = Network(self.clock, self.chance)
        self.fired: Counter[str] = Counter()
        datasets = [data_of(job.variant) for job in self.scenario.jobs]
        self.oracle = Oracle({data.manifest.digest: data for data in datasets})
        self.origin = Origin(self.network, self.chance)
        self.etcd = Etcd(self.network, self.scenario.ttl_seconds)
        self.network.add(self.origin)
        self.network.add(self.etcd)
        self.any_rings = self.scenario.any_rings
        biggest = max(data.total_bytes for data in datasets)
        self._capacity_bytes = max(int(biggest * self.scenario.capacity_share), 200)
        self.daemons: list[Daemon] = []
        for _ in range(self.scenario.daemons):
            self.join()
        self._folder = tempfile.TemporaryDirectory() if any(job.ledger for job in self.scenario.jobs) else None
        self.jobs = [self._job(number, data) for number, data in enumerate(datasets)]

    def _job(self, number: int, data: Data) -> Job:
        return Job(
            f"job{number}",
            self.scenario.jobs[number],
            data,
            Around(self.network, self.chance, self.origin, self.oracle, self._ring),
            folder=Path(self._folder.name) if self._folder is not None else None,
        )

    def join(self) -> Daemon:
        daemon = Daemon(
            f"n{len(self.daemons)}", self.network, self.chance, self.origin, self.oracle, self._capacity_bytes
        )
        daemon.ttl_seconds = self.scenario.ttl_seconds
        self.daemons.append(daemon)
        self.network.add(daemon)
        daemon.start()
        return daemon

    def say(self, what: str) -> None:
        if self._trace:
            print(f"{self.clock.now - START:8.3f}  {what}", flush=True)

    # -- rings --------------------------------------------------------------------------------------------------------

    def _ring(self, told: Ring | None) -> Ring:
        """Return the ring that a client believes in. ``told``: what a daemon answered; ``None``: it asks anew."""
        if self.any_rings:
            self.fired["a client's ring is arbitrary"] += 1
            return self._arbitrary_ring()
        if told is not None:
            return told
        living = [daemon for daemon in self.daemons if daemon.alive]
        return self.chance.choice(living).ring if living else Ring.of("sim", [])

    def _arbitrary_ring(self) -> Ring:
        members = [daemon.member for daemon in self.daemons if self.chance.random() < 0.6]
        ghosts = [Member(f"ghost{at}", f"http://ghost{at}:1", 10.0 ** self.chance.randint(0, 9)) for at in range(2)]
        members += [ghost for ghost in ghosts if self.chance.random() < 0.2]
        return Ring.of("sim", members)

    # -- running ------------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        with self._patched():
            for job in self.jobs:
                self.clock.after(job.plan.start, job.start)
            for fault in self.scenario.faults:
                self.clock.after(fault.at, functools.partial(self._begin, fault))
            steps = sum(job.plan.epochs * -(-len(job._data.truth) // min(job.plan.batch_size, 2)) for job in self.jobs)
            begun = self.clock.now
            bound = HORIZON_SECONDS + AFTERWARDS_SECONDS + STEP_SECONDS_MAX * min(steps, 60)
            self.clock.run(begun + bound, lambda: all(job.ended for job in self.jobs))
            for job in self.jobs:
                if job.ended_at is None:
                    violated("liveness", f"{job.name} has not ended after {bound:.0f} s: {self._state()}")
            took = self.clock.now - begun
            self._settle(begun)
            self._check()
            outcome = Outcome(self.seed, self.clock.now - begun, self.clock.events, self.oracle.checked, self.fired)
            outcome.slack = took / bound
            return outcome

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def _state(self) -> str:
        return ", ".join(f"{rank}: {list(rank.reading)}" for job in self.jobs for rank in job.ranks)

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        """Give the loader this clock, and a reporter without a thread."""
        clock = self.clock
        writer: Any = functools.partial(LedgerWriter, clock=clock.monotonic)
        writer.flush, writer.close = LedgerWriter.flush, LedgerWriter.close
        with (
            mock.patch.object(sampler_module, "time", clock),
            mock.patch.object(consumer_module, "time", clock),
            mock.patch.object(consumer_module, "LoopRate", functools.partial(LoopRate, clock.monotonic)),
            mock.patch.object(consumer_module, "NeedsReporter", SimulatedReporter),
            mock.patch.object(recording_module, "LedgerWriter", writer),
        ):
            yield

    # -- faults -------------------------------------------------------------------------------------------------------

    def daemon(self, fault: Fault) -> Daemon:
        """Return the daemon that a fault hits."""
        return self.daemons[fault.number % len(self.daemons)]

    def job(self, fault: Fault) -> Job:
        """Return the job that a fault hits."""
        return self.jobs[fault.number % len(self.jobs)]

    def _begin(self, fault: Fault) -> None:
        self.say(f"{fault.kind} for {fault.seconds:.1f} s ({self.daemon(fault)}, {self.job(fault).name})")
        self.fired[fault.kind] += faults.begin(self, fault)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _settle(self, begun: float) -> None:
        """Let time pass without faults and jobs: leases expire, fills end, and rings agree."""
        calm = max(self.clock.now, begun + HORIZON_SECONDS + 1.0)
        self.clock.run(calm + SETTLE_TTLS * self.scenario.ttl_seconds + 6.0, lambda: False)

    def _check(self) -> None:
        living = [daemon for daemon in self.daemons if daemon.alive]
        names = {daemon.name for daemon in living}
        for daemon in living:
            if daemon.fills or len(daemon.needs.commitments):
                violated("bounds", f"{daemon} still has {len(daemon.fills)} fills and {daemon.needs.commitments}")
            daemon.needs.expire(self.clock.now)
            if len(daemon.needs):
                violated("leases", f"{daemon} counts {len(daemon.needs)} consumers when all jobs have ended")
            self.oracle.capacity(daemon.name, daemon.held_bytes(), daemon.capacity_bytes)
            ring = {member.id for member in daemon.ring.members}
            if ring != names:
                violated("membership", f"{daemon} sees {sorted(ring)} where {sorted(names)} live")
            self.oracle.checked["rings"] += 1
        for job in self.jobs:
            job.check_epochs()
            self._check_ledger(job)
        if not self.scenario.faults:
            self._check_origin_reads()

    def _check_origin_reads(self) -> None:
        """Where nothing fails and all fits, each shard is read once from the origin."""
        twice = {shard.short: count for shard, count in self.origin.reads.items() if count > 1}
        if twice:
            violated("promise 4", f"read more than once without a fault: {twice}")
        self.oracle.checked["calm"] += 1

    def _check_ledger(self, job: Job) -> None:
        """A ledger replays what a job was given, however often it was killed."""
        if not job.plan.ledger or self._folder is None:
            return
        for number in range(job.world_size):
            order = job._sampler(SimulatedRank(), number)
            name = f"{job.name}.ledger" + (f".{number}" if job.world_size > 1 else "")
            replay = Replay(Path(self._folder.name) / name, order._recorder._run)
            for epoch in range(job.plan.epochs):
                if not (expected := job.order_of(epoch, number)):
                    continue
                found = replay.order(epoch, order.deal, order._passes.layout)
                rows = found.rows.tolist()
                if sorted(rows) != sorted(expected) or rows != expected:
                    violated("ledger", f"{job.name}, rank {number}, epoch {epoch}: replays another order")
                self.oracle.checked["replays"] += 1


class SimulatedRank:
    """Stands for a rank that only reads a ledger."""


def simulate(seed: int, *, trace: bool = False) -> Outcome:
    """Run one seed. Raises ``Violation`` naming the promise that was broken."""
    world = World(seed, trace=trace)
    if trace:
        print(world.scenario)
    collecting = gc.isenabled()
    gc.disable()  # a seed takes less than a collection would
    try:
        return world.run()
    finally:
        world.close()
        if collecting:
            gc.enable()
