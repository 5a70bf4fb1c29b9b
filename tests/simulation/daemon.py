"""A simulated daemon: what it holds, fills and evicts, by the real policy, ring and verification.

Modelled are the disk (survives a crash or not), single-flight, and room at the end of a fill; the rules are those of
``quiver_cacheserver.residency``. Everything that it decides is checked against ``Oracle`` when it is carried out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from quiver.digest import Digest
from quiver.errors import Corrupt
from quiver.residency import (
    Candidates,
    ConsumerReport,
    Decision,
    Needs,
    OriginEstimator,
    Recipe,
    Shelf,
    Situation,
    StoredFile,
    decide,
)
from quiver.ring import Member, Ring
from quiver.source import MemorySource, first_verified
from tests.simulation.clock import Process
from tests.simulation.dataset import Data
from tests.simulation.etcd import Seat
from tests.simulation.network import Network, Reply
from tests.simulation.oracle import Oracle
from tests.simulation.origin import Origin

PEER_SECONDS: Final = 0.8
READ_SECONDS: Final = 1.0  # that a reader waits for fills before it is told to ask again
FAILURE_SECONDS: Final = 2.0
TICK_SECONDS: Final = 1.0
COALESCE_SECONDS: Final = 0.15
FETCHES_MAX: Final = 4
RUNNERS_UP: Final = 2


@dataclass(slots=True)
class Stored:
    data: bytes
    used: float
    verified: bool = True


@dataclass(slots=True, eq=False)
class Fill:
    """A fill that is running. ``decision``: the policy's, or ``None`` for a reader's."""

    recipe: Recipe
    size_bytes: int
    began: float
    decided: bool
    ended: list[Callable[[str], None]] = field(default_factory=list)


class Daemon(Process):
    """One cache daemon."""

    def __init__(
        self, name: str, network: Network, chance: random.Random, origin: Origin, oracle: Oracle, capacity_bytes: int
    ) -> None:
        super().__init__(network.clock, name)
        self.network, self._chance, self._origin, self._oracle = network, chance, origin, oracle
        self.capacity_bytes = capacity_bytes
        self.member = Member(name, f"http://{name}:7717", float(capacity_bytes))
        self.disk: dict[Digest, Stored] = {}
        self.seat: Seat | None = None
        self.static: Ring | None = None  # a ring that is given, in place of the registry's
        self.ttl_seconds = 4.0
        self.draining = False
        self.quarantined = 0

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start, or start again with what the disk holds, none of it verified."""
        self.alive = True
        self.needs = Needs(self._chance.randrange(1 << 30))
        self.estimator = OriginEstimator()
        self.fills: dict[Digest, Fill] = {}
        self._failed: dict[Recipe, float] = {}
        self._datasets: dict[Digest, tuple[Data, Ring]] = {}
        self._is_due = False
        for stored in self.disk.values():
            stored.verified = False
        self.seat = Seat(self, self.member, self.network, self._chance, self.ttl_seconds)
        self.seat.connect()
        self.after(TICK_SECONDS, self._tick)

    def crash(self, *, loses_disk: bool) -> None:
        self.kill()
        self._oracle.fills_ended(self.name)
        if loses_disk:
            self.disk.clear()

    def drain(self) -> None:
        self.draining = True
        if self.seat is not None:
            self.seat.drain()

    @property
    def ring(self) -> Ring:
        if self.static is not None:
            return self.static
        return self.seat.ring if self.seat is not None else Ring.of("sim", [self.member])

    def held_bytes(self) -> int:
        return sum(len(stored.data) for stored in self.disk.values())

    # -- reports and decisions ----------------------------------------------------------------------------------------

    def report(self, data: Data, report: ConsumerReport, leaving: bool, reply: Reply) -> None:
        """Take a consumer's report; answer the ring, and what is held here."""
        now = self.clock.now
        if leaving:
            self.needs.leave(report.consumer)
            self._oracle.left(self.name, report.consumer)
            reply((self.ring, None))
            return
        dataset = data.manifest.digest
        if dataset not in self._datasets:
            self._learn(data)
        before = self.needs.leases.get(report.consumer)
        if not self.needs.report(dataset, report, now):
            reply((self.ring, None))
            return
        if before is not None:
            self.estimator.reported(now - before.reported_at)
        self._oracle.reported(self.name, report, dataset, now)
        reply((self.ring, self.needs.seen_by(report.consumer)))
        self._decide_soon()

    def _learn(self, data: Data) -> None:
        tables = data.manifest.tables
        held = np.array([digest in self.disk for digest in data.digests])
        self.needs.add_dataset(
            data.manifest.digest, tables.shard_digests, tables.shard_sizes.astype(float), held, self._mine(data)
        )
        self._datasets[data.manifest.digest] = data, self.ring

    def _mine(self, data: Data) -> npt.NDArray[np.bool_]:
        ring, tables = self.ring, data.manifest.tables
        own = next((at for at, member in enumerate(ring.members) if member.id == self.name), -2)
        mine: npt.NDArray[np.bool_] = ring.rank(tables.shard_digests, 1)[:, 0] == own
        return mine & (tables.shard_sizes <= self.capacity_bytes)

    def _follow_ring(self) -> None:
        for dataset, (data, ring) in list(self._datasets.items()):
            if ring is not self.ring:
                self._datasets[dataset] = data, self.ring
                self.needs.set_mine(dataset, self._mine(data))

    def _tick(self) -> None:
        if len(self.needs):
            self._decide()
        self.after(TICK_SECONDS, self._tick)

    def _decide_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self.after(COALESCE_SECONDS, self._decide)

    def _decide(self) -> None:
        self._is_due = False
        now = self.clock.now
        self._follow_ring()
        self.needs.expire(now)
        self._oracle.expired(self.name, self.needs, now)
        self._failed = {recipe: until for recipe, until in self._failed.items() if until > now}
        running = sum(fill.decided for fill in self.fills.values())
        if self.draining or running >= FETCHES_MAX:
            return
        situation = Situation(
            now=now,
            free_bytes=self._free_bytes(),
            fetches_max=FETCHES_MAX - running,
            origin=self.estimator.estimate,
            shelf=self._shelf,
            avoid=frozenset(self._failed),
        )
        for decision in decide(self.needs, situation):
            self._oracle.decided(self.name, decision, self.needs, held=self.disk.keys(), filling=self.fills.keys())
            self.needs.charge(decision)
            self._begin(decision, decided=True)

    def _shelf(self) -> Shelf:
        held = [StoredFile(digest, len(stored.data), stored.used) for digest, stored in self.disk.items()]
        return Shelf.of(held, self.clock.now, self.needs.needed_of)

    def _free_bytes(self) -> float:
        """As ``Rooms.free_bytes``: what is coming has its room, less what is evicted for it."""
        commitments, promised = self.needs.commitments, 0.0
        for shard, size_bytes in commitments.promised():
            if shard not in self.disk:
                evict = {each for decision in commitments.decisions_of(shard) for each in decision.evict}
                freed = sum(len(self.disk[each].data) for each in evict if each in self.disk)
                promised += max(size_bytes - freed, 0.0)
        return self.capacity_bytes - self.held_bytes() - promised

    # -- fills --------------------------------------------------------------------------------------------------------

    def _begin(self, decision: Decision, *, decided: bool) -> Fill:
        """Begin a fill, or join the one of this shard that is running."""
        running = self.fills.get(decision.shard)
        if running is not None:
            return running
        fill = Fill(decision.recipe, int(decision.size_bytes), self.clock.now, decided)
        self.fills[decision.shard] = fill
        self.needs.commitments.add(decision)
        self._oracle.fill_began(self.name, decision.shard)
        if decided:
            self.estimator.began(self.clock.now)
        data, _ = self._datasets[decision.dataset]
        row = np.frombuffer(decision.shard, np.uint8)[None]
        ring = self.ring
        ranked = [ring.members[at] for at in ring.rank(row, RUNNERS_UP + 1)[0].tolist() if at >= 0]
        peers = [member.url.split("/")[2].split(":")[0] for member in ranked if member.id != self.name][:RUNNERS_UP]
        self._from_peers(fill, data, peers)
        return fill

    def _from_peers(self, fill: Fill, data: Data, peers: list[str]) -> None:
        if not peers:
            self._origin.read_shard(self, data, fill.recipe.shard, partial(self._got, fill, data, [], True))
            return
        shard = fill.recipe.shard
        self.network.request(
            self,
            peers[0],
            lambda peer, reply: reply(peer.give(shard) if isinstance(peer, Daemon) else None),
            partial(self._got, fill, data, peers[1:], False),
            PEER_SECONDS,
        )

    def give(self, shard: Digest) -> bytes | None:
        """Hand a shard to a peer as it is on disk."""
        stored = self.disk.get(shard)
        return None if stored is None else self.network.payload(stored.data)

    def _got(self, fill: Fill, data: Data, peers: list[str], from_origin: bool, answer: bytes | None) -> None:
        if self.fills.get(fill.recipe.shard) is not fill:
            return
        if answer is None and from_origin:
            self._end(fill, "failed")
            return
        try:
            if answer is None:
                raise Corrupt("no answer", "peer")
            source = MemorySource({fill.recipe.shard: answer})
            shard, _ = first_verified([source], fill.recipe.shard, fill.size_bytes)
        except Corrupt:
            if from_origin:
                self._end(fill, "failed")
            else:
                self._from_peers(fill, data, peers)
            return
        self._oracle.door(fill.recipe.shard, shard.data, data)
        self._end(fill, "done" if self._admit(fill, bytes(shard.data)) else "no room", from_origin=from_origin)

    def _admit(self, fill: Fill, content: bytes) -> bool:
        """Make room and store a verified shard; return whether there was room."""
        shard = fill.recipe.shard
        if shard in self.disk:
            return True
        evict = self._evictions(shard, len(content))
        if evict is None:
            return False
        self._oracle.evicted(self.name, evict, self.needs.commitments.decisions_of(shard), self.clock.now)
        for victim in evict:
            del self.disk[victim]
            self.needs.gone(victim)
        self.disk[shard] = Stored(content, self.clock.now)
        self._oracle.capacity(self.name, self.held_bytes(), self.capacity_bytes)
        self.needs.arrived(shard)
        return True

    def _evictions(self, shard: Digest, size_bytes: int) -> list[Digest] | None:
        """As ``Rooms._evictions``: what was decided and is not needed since then, then what nobody needs."""
        lacking = size_bytes - (self.capacity_bytes - self.held_bytes())
        evict: list[Digest] = []
        for decision in self.needs.commitments.decisions_of(shard):
            for victim in decision.evict:
                may_go = victim in decision.forced or not self.needs.needed(victim)
                if lacking > 0 and victim in self.disk and victim not in evict and may_go:
                    evict.append(victim)
                    lacking -= len(self.disk[victim].data)
        if lacking <= 0:
            return evict
        shelf = self._shelf()
        chosen = Candidates(shelf, without=[*self.needs.commitments.evicting, *evict]).choose(lacking)
        return None if chosen is None else evict + [shelf.name(at) for at in chosen]

    def _end(self, fill: Fill, how: str, *, from_origin: bool = False) -> None:
        shard = fill.recipe.shard
        del self.fills[shard]
        self._oracle.fill_ended(self.name, shard)
        self.needs.end(fill.recipe)
        if fill.decided:
            seconds = self.clock.now - fill.began if how == "done" else None
            self.estimator.ended(self.clock.now, seconds, float(fill.size_bytes) if from_origin else 0.0)
        if how != "done":
            self._failed[fill.recipe] = self.clock.now + FAILURE_SECONDS
        for ended in fill.ended:
            ended(how)
        self._decide_soon()

    # -- reads --------------------------------------------------------------------------------------------------------

    def read(self, data: Data, shards: list[Digest], suspected: set[Digest], reply: Reply) -> None:
        """Answer by shard its bytes, or why they are not there. Missing shards are filled meanwhile."""
        if data.manifest.digest not in self._datasets:
            self._learn(data)
        for shard in suspected:
            if shard in self.disk:
                self.disk[shard].verified = False
        waiting: set[Digest] = set()
        answered = [False]
        why: dict[Digest, str] = {}

        def answer() -> None:
            if not answered[0]:
                answered[0] = True
                reply({shard: self._answer(shard, why.get(shard, "filling")) for shard in shards})

        def ended(shard: Digest, how: str) -> None:
            waiting.discard(shard)
            why[shard] = how
            if not waiting:
                answer()

        for shard in shards:
            if self._is_resident(shard, data):
                continue
            recipe = Recipe(shard, data.manifest.digest)
            if self._failed.get(recipe, 0.0) > self.clock.now:
                why[shard] = "failed"
                continue
            size_bytes = float(len(data.shards[shard]))
            if size_bytes > self.capacity_bytes or self.draining:
                why[shard] = "no room"
                continue
            fill = self._begin(Decision(shard, recipe.dataset, size_bytes), decided=False)
            waiting.add(shard)
            fill.ended.append(partial(ended, shard))
        if waiting:
            self.after(READ_SECONDS, answer)
        else:
            answer()

    def _answer(self, shard: Digest, otherwise: str) -> Any:
        stored = self.disk.get(shard)
        if stored is None:
            return otherwise
        stored.used = self.clock.now
        return self.network.payload(stored.data)

    def _is_resident(self, shard: Digest, data: Data) -> bool:
        """Whether a shard is here and right, verified before its first use since the start."""
        stored = self.disk.get(shard)
        if stored is None:
            return False
        if not stored.verified:
            try:
                first_verified([MemorySource({shard: stored.data})], shard, len(data.shards[shard]))
            except Corrupt:
                del self.disk[shard]
                self.needs.gone(shard)
                self.quarantined += 1
                return False
            stored.verified = True
        return True
