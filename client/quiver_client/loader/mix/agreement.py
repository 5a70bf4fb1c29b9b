"""Whether the ranks of a job read the same mixture: the same parts, at the same weights, dealt in the same way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from quiver_client.loader.epoch import Deal
from quiver_client.loader.rank_agreement import RankAgreement
from quiver_client.mix import Mix


class MixAgreement(RankAgreement):
    """``RankAgreement`` about a mixture: it is one dataset, made of its parts."""

    def __init__(self, mix: Mix, deal: Deal, *, of_groups: bool = False) -> None:
        super().__init__(mix.placement(), mix.identity, deal, None, of_groups=of_groups)
        self._settings |= {
            "weights": list(mix.shares),
            "parts": list(mix.parts),
            "epoch": mix.epoch,
            "mix_seed": mix.seed,
            "guided": mix.guided is not None,
        }
        self._by_epoch = True  # the parts' passes go on from one epoch to the next, even in the order of the manifest

    def begin_at(self, ranks: tuple[int, int], epoch: int, dealt_before: Sequence[Any]) -> None:
        """A pass begins. ``dealt_before``: what the shares were dealt after; empty for nothing."""
        done = json.dumps(list(dealt_before)).encode() if dealt_before else None
        self.begin(ranks, epoch, {"done": done})
