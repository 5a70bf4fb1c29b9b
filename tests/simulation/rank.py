"""One rank of a job: the real batch sampler, plan and verification; modelled are threads, sockets and the loop.

It does what ``quiver_client.loader.threads``, ``rack.tier`` and ``needs_reporter`` do, without a thread.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from quiver import forks
from quiver.digest import Digest
from quiver.plan import plan_batch
from quiver.residency import ConsumerReport
from quiver.ring import Member, Ring
from quiver.substitution import Ints, View
from quiver_client.batch import Batch
from quiver_client.buffers import Buffer
from quiver_client.loader.epoch import Drawn, Epoch
from quiver_client.loader.loop_rate import LoopTurn
from quiver_client.loader.sampler import BatchSampler
from quiver_client.needs_reporter import NeedsReporter
from tests.simulation.clock import Process
from tests.simulation.daemon import Daemon
from tests.simulation.dataset import Data
from tests.simulation.network import Network
from tests.simulation.origin import Origin

AHEAD: Final = 2
ASK_SECONDS: Final = 1.5
REPOLL_SECONDS: Final = 0.25
REPORT_SECONDS: Final = (0.6, 2.0)  # bounds of the time between two reports
ANSWER_SECONDS: Final = 0.5
STALE_SECONDS: Final = 5.0
DOWN_SECONDS: Final = 1.0  # for which a daemon that did not answer is not asked
FILL_SECONDS_MAX: Final = 5.0  # that a batch waits for fills; then it reads the origin
ORIGIN_TRIES: Final = 4  # then the job ends with an error, and is resumed


@dataclass(slots=True, eq=False)
class Reading:
    """A batch that is being read."""

    drawn: Drawn
    batch: Batch
    began: float
    tried: dict[int, set[str]] = field(default_factory=dict)
    to_origin: set[int] = field(default_factory=set)
    wrong: set[int] = field(default_factory=set)
    origin_tries: int = 0
    done: bool = False


class SimulatedReporter(NeedsReporter):
    """The real reporter's record of answers, without its thread: the rank says when it reports."""

    def __init__(self, shard_count: int, channel: Any, report: Any) -> None:
        self._channel, self.make_report = channel, report
        self._changed = forks.condition()
        self._arrivals = self._turns = 0
        nothing = np.zeros(shard_count, np.int64)
        self._view = View(nothing.astype(bool), nothing.astype(np.uint8), nothing)
        channel.reporter = self
        channel.report_soon(0.0)

    def first_answer(self, timeout_seconds: float) -> None: ...

    def wait(self, timeout_seconds: float) -> None: ...

    def nudge(self) -> None:
        self._channel.report_soon(0.05)

    def close(self) -> None:
        self._channel.leave()

    def learn(self, seen: Any) -> None:
        self._learn(seen)


class Rank(Process):
    """A rank, from the start of a run to its end. The job makes a new one for each run."""

    orphaned = None

    def __init__(
        self,
        name: str,
        network: Network,
        chance: random.Random,
        data: Data,
        origin: Origin,
        rings: Callable[[], Ring],
        *,
        job: Any,
    ) -> None:
        super().__init__(network.clock, name)
        self._network, self._chance, self._data, self._origin, self._rings = network, chance, data, origin, rings
        self._job = job
        self.order: BatchSampler = None  # type: ignore[assignment]
        self.reporter: SimulatedReporter | None = None
        self.ring: Ring = rings()
        self.reading: OrderedDict[int, Reading] = OrderedDict()
        self.at_end = False
        self.asked_at = 0.0
        self.corruptions = self.fallbacks = 0
        self._epoch: Epoch | None = None
        self._drawn_all = False
        self._down: dict[str, float] = {}
        self._seen: dict[str, tuple[float, Any]] = {}
        self._report_number = 0
        self._due_at = np.inf
        self._repolls = False
        self._suspects: set[Digest] = set()

    # -- the loop -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._epoch = self.order.begin()
        self.at_end = self._drawn_all = False
        self.reading.clear()
        self.ask()

    @property
    def epoch(self) -> Epoch:
        assert self._epoch is not None
        return self._epoch

    def ask(self) -> None:
        """The loop asks for the next batch."""
        self.asked_at = self.clock.now
        self.order.asked()
        self._pump()

    @property
    def ready(self) -> bool:
        """Whether the next batch is in memory, or the pass has ended; never while this process is stopped."""
        if self.asleep or not self.alive:
            return False
        return self.at_end or bool(self.reading and next(iter(self.reading.values())).done)

    def consume(self) -> tuple[int, list[int], list[bytes]]:
        """Hand the next batch to the loop; return its epoch, samples and bytes."""
        number, reading = self.reading.popitem(last=False)
        self.order.consumed(self.epoch, number, LoopTurn(self.clock.now - self.asked_at))
        samples = [bytes(view) for view in reading.batch.views(0) if view is not None]
        return self.epoch.number, reading.drawn.rows.tolist(), samples

    def _pump(self) -> None:
        """Draw ahead, as far as there is something to draw."""
        while not self._drawn_all and len(self.reading) < AHEAD:
            if not self.order.poll(self.epoch):
                self.report_soon(0.2)
                if not self._repolls:
                    self._repolls = True
                    self.after(REPOLL_SECONDS, self._repoll)
                break
            drawn = self.order.draw(self.epoch)
            if drawn is None:
                self._drawn_all = True
                break
            batch = Batch(plan_batch(self._data.manifest, drawn.rows), "fast")
            self.reading[drawn.number] = Reading(drawn, batch, self.clock.now)
            self._read(self.reading[drawn.number])
        self.at_end = self._drawn_all and not self.reading
        self._job.step_if_ready()

    def _repoll(self) -> None:
        self._repolls = False
        self._pump()

    # -- reading a batch ----------------------------------------------------------------------------------------------

    def _read(self, reading: Reading) -> None:
        """Ask each shard's daemon for what is missing, then the next one, then the origin."""
        plan = reading.batch.plan
        pending = reading.batch.not_verified()
        if not len(pending):
            reading.done = True
            self.order.fetched(self.epoch, reading.drawn.number)
            self._pump()
            return
        shards = np.unique(plan.shards[pending])
        if self.clock.now - reading.began > FILL_SECONDS_MAX:
            reading.to_origin.update(shards.tolist())
        by_peer: dict[str, list[int]] = {}
        for shard, peers in zip(shards.tolist(), self._choices(shards), strict=True):
            usable = [peer for peer in peers if peer not in reading.tried.get(shard, ()) and not self._is_down(peer)]
            if usable and shard not in reading.to_origin:
                self.fallbacks += usable[0] != peers[0]
                by_peer.setdefault(usable[0], []).append(shard)
            else:
                reading.to_origin.add(shard)
        left = [len(by_peer)]
        if not by_peer:
            self._read_origin(reading)
            return

        def answered(peer: str, its: list[int], answer: Any) -> None:
            self._put(reading, peer, its, answer)
            left[0] -= 1
            if not left[0]:
                self._round_ended(reading)

        for peer, its in by_peer.items():
            digests = [self._data.manifest.shard_digest(shard) for shard in its]
            suspected = self._suspects.intersection(digests)
            self._suspects -= suspected
            ask = partial(_ask_to_read, self._data, digests, suspected)
            self._network.request(self, peer, ask, partial(answered, peer, its), ASK_SECONDS)

    def _put(self, reading: Reading, peer: str, shards: list[int], answer: Any) -> None:
        if answer is None:
            self._down[peer] = self.clock.now + DOWN_SECONDS
            for shard in shards:
                reading.tried.setdefault(shard, set()).add(peer)
            return
        plan = reading.batch.plan
        for shard in shards:
            got = answer[self._data.manifest.shard_digest(shard)]
            if isinstance(got, bytes):
                positions = np.flatnonzero((plan.shards == shard) & ~reading.batch.verified)
                reading.batch.put(positions, Buffer.of(got), plan.offsets[positions])
            elif got != "filling":
                reading.to_origin.add(shard)

    def _round_ended(self, reading: Reading) -> None:
        bad = reading.batch.check()
        self._blame(reading, bad)
        moved = bool(len(bad)) or not len(reading.batch.not_verified())
        if moved:
            self._read(reading)
        else:
            self.after(0.1, lambda: self._read(reading))

    def _blame(self, reading: Reading, bad: Any) -> None:
        """Have the shard verified where it is; the second time it was wrong, read the origin."""
        self.corruptions += len(bad)
        for shard in np.unique(reading.batch.plan.shards[bad]).tolist():
            if shard in reading.wrong:
                reading.to_origin.add(shard)
            reading.wrong.add(shard)
            self._suspects.add(self._data.manifest.shard_digest(shard))

    def _read_origin(self, reading: Reading) -> None:
        positions = reading.batch.not_verified()
        rows = reading.drawn.rows[positions].tolist()

        def got(samples: list[bytes] | None) -> None:
            if samples is None:
                reading.origin_tries += 1
                if reading.origin_tries >= ORIGIN_TRIES:
                    self._job.failed()
                    return
            else:
                data = b"".join(samples)
                ends = np.cumsum([len(sample) for sample in samples])
                reading.batch.put(positions, Buffer.of(data), ends - [len(sample) for sample in samples])
                self.corruptions += len(reading.batch.check())
            self.after(0.02, lambda: self._read(reading))

        self._origin.read_samples(self, self._data, rows, got)

    def _choices(self, shards: Ints) -> list[list[str]]:
        ring = self.ring
        ranked = ring.rank(self._data.manifest.tables.shard_digests[shards], 2)
        hosts = [_host(member) for member in ring.members]
        return [[hosts[at] for at in row if at >= 0] for row in ranked.tolist()]

    def _is_down(self, peer: str) -> bool:
        return self._down.get(peer, 0.0) > self.clock.now

    # -- reports ------------------------------------------------------------------------------------------------------

    def report_soon(self, seconds: float) -> None:
        at = self.clock.now + seconds
        if self._due_at <= at:
            return
        self._due_at = at
        self.after(seconds, lambda: self._report() if self._due_at == at else None)

    def _report(self) -> None:
        self._due_at = np.inf
        if self.reporter is None:
            return
        report, pause = self.reporter.make_report()
        self._report_number += 1
        number, left = self._report_number, [0]
        peers = [host for host in dict.fromkeys(map(_host, self.ring.members)) if not self._is_down(host)]

        def answered(peer: str, answer: Any) -> None:
            if answer is None:
                self._down[peer] = self.clock.now + DOWN_SECONDS
            else:
                ring, seen = answer
                self.ring = self._job.ring_for(self, ring)
                if seen is not None:
                    self._seen[peer] = self.clock.now + STALE_SECONDS, seen
            left[0] -= 1
            if not left[0] and number == self._report_number:
                self._learn()

        left[0] = len(peers)
        for peer in peers:
            ask = partial(_ask_to_report, self._data, report)
            self._network.request(self, peer, ask, partial(answered, peer), ANSWER_SECONDS)
        if not peers:
            self.ring = self._rings()
            self._learn()
        least, most = REPORT_SECONDS
        self.report_soon(min(max(pause, least), most))

    def _learn(self) -> None:
        if self.reporter is None:  # it has left meanwhile
            return
        seen = np.zeros(self._data.manifest.shard_count, np.uint8)
        self._seen = {peer: it for peer, it in self._seen.items() if it[0] > self.clock.now}
        for peer, (_, answer) in self._seen.items():
            if not self._is_down(peer):
                np.maximum(seen, answer, out=seen)
        self.reporter.learn(seen)
        if self._epoch is not None and self.alive:
            self._pump()

    def leave(self) -> None:
        """Withdraw the needs. A killed process does not come to it."""
        reporter, self.reporter = self.reporter, None
        if reporter is None or not self.alive:
            return
        report, _ = reporter.make_report()
        for peer in dict.fromkeys(map(_host, self.ring.members)):
            self._network.tell(self, peer, partial(_tell_leaving, self._data, report))


def _host(member: Member) -> str:
    return member.url.split("/")[2].split(":")[0]


def _ask_to_read(data: Data, digests: list[Digest], suspected: set[Digest], process: Process, reply: Any) -> None:
    if isinstance(process, Daemon):
        process.read(data, digests, suspected, reply)


def _ask_to_report(data: Data, report: ConsumerReport, process: Process, reply: Any) -> None:
    if isinstance(process, Daemon):
        process.report(data, report, False, reply)


def _tell_leaving(data: Data, report: ConsumerReport, process: Process) -> None:
    if isinstance(process, Daemon):
        process.report(data, report, True, lambda answer: None)
