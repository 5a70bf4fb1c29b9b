"""The simulation can fail: rules broken one at a time, each noticed by some seed, for the right reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quiver import source
from quiver.membership import State, machine
from quiver.residency import Candidates, Leases, Needs, policy
from quiver.shard import Shard
from quiver.substitution import Order
from quiver_client.batch import Batch
from quiver_client.loader import epoch as epoch_module
from quiver_client.loader import state as state_module
from quiver_client.loader.draw_wait import DrawWait
from quiver_client.loader.epoch import Epoch
from quiver_client.loader.ledger.recording import Recorder
from tests.simulation.world import simulate

SEEDS = 150
Break = Callable[[pytest.MonkeyPatch], None]


def _drops_a_sample(patch: pytest.MonkeyPatch) -> None:
    take = Order.take

    def taken(self: Order, entries: Any) -> None:
        take(self, entries)
        if len(entries) > 1 and len(self) > 1 and np.any(np.diff(entries) > 1):  # only if something was substituted
            take(self, self.plain(1))

    patch.setattr(Order, "take", taken)


def _counts_what_was_drawn(patch: pytest.MonkeyPatch) -> None:
    draw = Epoch.draw

    def drawn(self: Epoch, entries: Any) -> Any:
        self.consumed[self._entries[entries]] = True
        return draw(self, entries)

    patch.setattr(Epoch, "draw", drawn)


def _merges_done_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state_module, "_consumed", lambda state: state_module.unpack(state["done"], state["samples"]))


def _deals_from_the_wrong_rank(patch: pytest.MonkeyPatch) -> None:
    dealt = epoch_module.dealt

    def wrong(order: Any, rank: int, world_size: int, batch_size: int, *, drop_last: bool) -> Any:
        return dealt(order, max(rank - 1, 0), world_size, batch_size, drop_last=drop_last)

    patch.setattr(epoch_module, "dealt", wrong)


BROKEN: dict[str, tuple[str, Break]] = {
    "the own key is not looked at when the list is read": (
        "membership",
        lambda patch: patch.setattr(State, "registered", property(lambda self: bool(self.lease))),
    ),
    "members that were kept after an outage stay for ever": (
        "liveness",
        lambda patch: patch.setattr(machine, "_settled", lambda state, now: state),
    ),
    "a lease never expires": ("leases", lambda patch: patch.setattr(Leases, "expire", lambda self, now: [])),
    "what is coming is decided on again": (
        "single-flight",
        lambda patch: patch.setattr(policy, "_coming", lambda needs, avoid: set()),
    ),
    "needed shards count as needed by nobody": (
        "eviction",
        lambda patch: patch.setattr(Needs, "needed_of", lambda self, shards: np.zeros(len(shards), np.int8)),
    ),
    "a starving consumer is not charged": (
        "eviction",
        lambda patch: patch.setattr(Needs, "charge", lambda self, decision: None),
    ),
    "one eviction fewer than needed": (
        "capacity",
        lambda patch: patch.setattr(Candidates, "choose", lambda self, free, of=None: self.most(free)[0][:-1]),
    ),
    "a shard is not verified": (
        "promise 1",
        lambda patch: patch.setattr(source, "verified", lambda digest, data, name: Shard(digest, data)),
    ),
    "a batch is not verified": (
        "promise 1",
        lambda patch: patch.setattr(Batch, "_right", lambda self, new: np.ones(len(new), bool)),
    ),
    "substitution drops a pending sample": ("promise 2", _drops_a_sample),
    "a batch counts as consumed when it is drawn": ("promise 2", _counts_what_was_drawn),
    "merging forgets what ranks consumed since the deal": ("promise 2", _merges_done_alone),
    "a rank reads its neighbour's share": ("promise 2", _deals_from_the_wrong_rank),
    "a draw waits for ever": (
        "liveness",
        lambda patch: patch.setattr(DrawWait, "go_on", lambda self, now, usable: True),
    ),
    "a checkpoint is ahead of the ledger": (
        "replay",
        lambda patch: patch.setattr(Recorder, "flush", lambda self: None),
    ),
}


def _all_exact() -> None:
    for seed in range(SEEDS):
        simulate(seed)


@pytest.mark.planted
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    promise, break_it = BROKEN[name]
    break_it(monkeypatch)
    with pytest.raises((AssertionError, ValueError), match=promise):
        _all_exact()
