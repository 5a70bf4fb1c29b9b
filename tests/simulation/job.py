"""A job: ranks that train in step, checkpoints, kills and resumes; and the history of what its loop was given."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from quiver.ring import Ring
from quiver_client import merge_states
from quiver_client.loader import arguments as arguments_module
from quiver_client.loader import rank_agreement
from quiver_client.loader.sampler import BatchSampler
from tests.simulation.clock import Clock
from tests.simulation.dataset import Data, SimulatedDataset
from tests.simulation.network import Network
from tests.simulation.oracle import Oracle, violated
from tests.simulation.origin import Origin
from tests.simulation.rank import Rank

State = dict[str, Any]


@dataclass(frozen=True)
class JobPlan:
    """What a job does, drawn from the seed."""

    variant: int  # of the dataset
    world_size: int
    batch_size: int
    epochs: int
    step_seconds: float
    start: float
    substitute: bool
    lookahead: int | None
    drop_last: bool
    is_named: bool
    checkpoint_steps: int
    other_worlds: bool  # resumes with other ranks and batch sizes
    ledger: bool
    seed: int


class Entry(NamedTuple):
    """A batch that a rank's loop was given."""

    epoch: int
    deal: int
    rank: int
    rows: list[int]


class Deal(NamedTuple):
    """How the rest of an epoch was dealt to ranks."""

    world_size: int
    batch_size: int


class Around(NamedTuple):
    """What a job runs in. ``rings`` returns the ring that a client believes in, given the one that it was told."""

    network: Network
    chance: random.Random
    origin: Origin
    oracle: Oracle
    rings: Callable[[Ring | None], Ring]


class Job:
    """Runs a plan to its end, through as many runs as it is killed plus one."""

    def __init__(
        self,
        name: str,
        plan: JobPlan,
        data: Data,
        around: Around,
        *,
        folder: Path | None,
    ) -> None:
        self.name, self.plan, self._data = name, plan, data
        self._network, self._chance, self._origin, self._oracle, self._rings = around
        self._clock: Clock = self._network.clock
        self._folder = folder
        self.ranks: list[Rank] = []
        self.world_size, self.batch_size = plan.world_size, plan.batch_size
        self.history: list[Entry] = []
        self.deals: list[Deal] = []
        self.runs = self.kills = self.errors = 0
        self.substitutions = 0
        self.corruptions = 0
        self.ended_at: float | None = None
        self._saved: tuple[list[State] | None, int, int] = (None, 0, 0)  # states, history and deal at the checkpoint
        self._deal = 0
        self._begun: dict[int, int] = {}  # by epoch, the deal of it that began last
        self._steps = 0
        self._stepping = False

    @property
    def ended(self) -> bool:
        return self.ended_at is not None

    @property
    def running(self) -> bool:
        return bool(self.ranks) and not self.ended

    # -- runs ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a run, from the last checkpoint if there is one."""
        plan, (states, kept, deal) = self.plan, self._saved
        del self.history[kept:]
        self._deal = deal
        self.runs += 1
        if self.runs > 1 and plan.other_worlds and not plan.ledger and self._chance.random() < 0.7:
            self.world_size = self._chance.randint(1, 3)
            self.batch_size = self._chance.randint(2, 12)
        arguments_module._made.clear()  # a new process
        rank_agreement._made.clear()
        self.ranks = []
        resumed = self._resumed(states)
        for number in range(self.world_size):
            rank = Rank(
                f"{self.name}.{number}",
                self._network,
                self._chance,
                self._data,
                self._origin,
                partial(self._rings, None),
                job=self,
            )
            rank.life = self.runs
            self._network.add(rank)
            rank.order = self._sampler(rank, number)
            if resumed is not None:
                rank.order.load_state_dict(resumed[number] if len(resumed) > 1 else resumed[0])
            self.ranks.append(rank)
        if resumed is not None:  # with drop_last, too little may be left for so many ranks: the epoch has ended
            self._begun[resumed[0]["epoch"]] = self._deal
        self._begin()

    def _begin(self) -> None:
        for rank in list(self.ranks):
            rank.begin()
        if self.ranks:
            self._begun[self.ranks[0].epoch.number] = self._deal

    def _resumed(self, states: list[State] | None) -> list[State] | None:
        """Return the states to load: each rank's own if the ranks are the same, else all of them merged."""
        if states is None:
            self._deal_anew()
            return None
        same = len(states) == self.world_size and states[0]["batch_size"] == self.batch_size
        if same and (self.plan.ledger or self._chance.random() < 0.6):
            return copy.deepcopy(states)
        self._deal_anew()
        return [merge_states(copy.deepcopy(states))]

    def _deal_anew(self) -> None:
        self.deals.append(Deal(self.world_size, self.batch_size))
        self._deal = len(self.deals) - 1

    def _sampler(self, rank: Rank, number: int) -> BatchSampler:
        plan = self.plan
        return BatchSampler(
            SimulatedDataset(self._data, rank),
            self.batch_size,
            shuffle=True,
            drop_last=plan.drop_last,
            substitute=plan.substitute,
            lookahead=plan.lookahead or "auto",
            seed=plan.seed,
            rank=number,
            world_size=self.world_size,
            job=self.name if plan.is_named else f"{self.name} {self.runs}",
            ledger=str(self._folder / f"{self.name}.ledger") if self._folder is not None and plan.ledger else None,
        )

    def ring_for(self, rank: Rank, told: Ring) -> Ring:
        """Return the ring that a rank believes in: the one that it was told, or any other."""
        return self._rings(told)

    def kill(self) -> None:
        """SIGKILL to all ranks: what is not in the checkpoint is lost."""
        if not self.running:
            return
        self.kills += 1
        for rank in self.ranks:
            rank.kill()
            rank.reporter = None
            rank.order._recorder._stop()  # the file is closed as it is
        self._drop_ranks()
        self._stepping = False
        self._clock.after(0.5 + self._chance.random(), self.start)

    def failed(self) -> None:
        """A rank's loop raised: the origin was away for too long. The job is started again."""
        self.errors += 1
        self.kill()

    def _drop_ranks(self) -> None:
        for rank in self.ranks:
            self.corruptions += rank.corruptions
            self.substitutions += rank.order.dataset.substitutions  # type: ignore[attr-defined]
        self.ranks = []

    # -- steps --------------------------------------------------------------------------------------------------------

    def step_if_ready(self) -> None:
        """Train one step if every rank has its batch: ranks train in step."""
        if self._stepping or not self.ranks or not all(rank.ready for rank in self.ranks):
            return
        ends = [rank.at_end for rank in self.ranks]
        if any(ends):
            if not all(ends):
                violated("batches", f"{self.name}: ranks have different numbers of batches")
            self._stepping = True
            self._clock.after(0.0, self._next_epoch)
            return
        self._stepping = True
        for number, rank in enumerate(self.ranks):
            epoch, rows, samples = rank.consume()
            self._oracle.consumed(rank.name, self._data, rows, samples)
            self.history.append(Entry(epoch, self._deal, number, rows))
        self._steps += 1
        if self._steps % self.plan.checkpoint_steps == 0:
            self.checkpoint()
        runs = self.runs
        self._clock.after(self.plan.step_seconds, lambda: self._ask() if runs == self.runs else None)

    def checkpoint(self) -> None:
        """Save the states of all ranks."""
        states = [copy.deepcopy(rank.order.state_dict()) for rank in self.ranks]
        self._saved = states, len(self.history), self._deal

    def _ask(self) -> None:
        self._stepping = False
        for rank in self.ranks:
            rank.call(rank.ask)

    def _next_epoch(self) -> None:
        if not self.ranks:
            return
        if any(rank.asleep for rank in self.ranks):
            self._clock.after(0.5, self._next_epoch)
            return
        epochs = {rank.epoch.number for rank in self.ranks}
        if len(epochs) != 1:
            violated("epochs", f"{self.name}: ranks are in epochs {sorted(epochs)}")
        for rank in self.ranks:
            rank.order.end(rank.epoch)
        self._stepping = False
        if epochs.pop() + 1 >= self.plan.epochs:
            for rank in self.ranks:
                rank.order.close()
            self.ended_at = self._clock.now
            self._drop_ranks()
            return
        self._deal_anew()
        self._begin()

    # -- what it came to ----------------------------------------------------------------------------------------------

    def check_epochs(self) -> None:
        """Every sample exactly once per epoch, but for what is repeated or left out so that all ranks get as many."""
        count, drop_last = len(self._data.truth), self.plan.drop_last
        for epoch in range(self.plan.epochs):
            entries = [entry for entry in self.history if entry.epoch == epoch]
            counts = Counter(row for entry in entries for row in entry.rows)
            begun = {entry.deal for entry in entries} | {self._begun.get(epoch, 0)}
            deals = [self.deals[deal] for deal in sorted(begun)]
            repeated, missing = counts.total() - len(counts), count - len(counts)
            if len(deals) == 1:
                ((world_size, batch_size),) = deals
                spare = 0 if drop_last else -count % world_size
                left_out = count - count // world_size // batch_size * batch_size * world_size if drop_last else 0
                right = (repeated, missing) == (spare, left_out)
            else:
                spare = 0 if drop_last else sum(deal.world_size - 1 for deal in deals)
                left_out = sum(deal.world_size * deal.batch_size - 1 for deal in deals) if drop_last else 0
                right = repeated <= spare and missing <= left_out
            if not right or max(counts.values(), default=0) > 1 + len(deals):
                violated(
                    "promise 2",
                    f"{self.name}, epoch {epoch}: {missing} of {count} samples never and {repeated} twice, in deals"
                    f" {[tuple(deal) for deal in deals]}, after {self.kills} kills",
                )
            self._oracle.checked["epochs"] += 1

    def order_of(self, epoch: int, rank: int) -> list[int]:
        """Return what one rank was given of an epoch, in order."""
        return [row for entry in self.history if (entry.epoch, entry.rank) == (epoch, rank) for row in entry.rows]
