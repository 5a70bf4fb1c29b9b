"""Whether the ranks of one group began alike: the same dataset, settings, epoch and state, and so the same order.

Like the ranks of a job (``rank_agreement``) they compare through torch.distributed's store, and none waits for another:
who begins first writes, and the others compare.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import blake3

from quiver.errors import Misconfigured
from quiver_client.loader.rank_agreement import PREFIX, compare, maker
from quiver_client.loader.replicas.group import ReplicaGroup

Facts = dict[str, Any]
_made: Counter[str] = Counter()  # loaders of this process by group and by the line that made them


class GroupAgreement:
    """Made by the loader's constructor, whose caller identifies it: the n-th loader that this line makes."""

    def __init__(self, group: ReplicaGroup, settings: Facts) -> None:
        self._group = group
        self._settings = settings | {"rank": group.rank, "world_size": group.world_size}
        made = blake3.blake3(f"{group.members}\0{maker()}".encode()).hexdigest(16)
        _made[made] += 1
        self.key = f"{PREFIX}/replicas/{made}/{_made[made]}"  # under which the ranks of the group meet
        self._begun = 0
        self._finished = 0

    def begin(self, store: Any, epoch: int, facts: Facts) -> int:
        """A pass begins: return its number. Raises ``Misconfigured`` that says what another rank of the group has."""
        self._begun += 1
        try:
            self._compare_settings(store)
            self._compare_pass(store, epoch, facts | {"epoch": epoch})
        except Misconfigured as error:
            store.set(self._refused, str(error))
            raise
        return self._begun

    def check(self, store: Any) -> None:
        """Raise ``Misconfigured`` if another rank of the group raised it, and so will not come."""
        if store.check([self._refused]):
            raise Misconfigured(bytes(store.get(self._refused)).decode(errors="replace"))

    @property
    def _refused(self) -> str:
        return f"{self.key}/refused"

    def _compare_settings(self, store: Any) -> None:
        own = self._group.own
        first, theirs = compare(store, f"{self.key}/settings", own, self._settings)
        for name in sorted(self._settings | theirs):
            if self._settings.get(name) != theirs.get(name):
                raise Misconfigured(
                    f"{name}: it is {self._settings.get(name)} in rank {own} and {theirs.get(name)} in rank {first},"
                    " which have to get the same samples. Give all ranks of the group the same"
                )

    def _compare_pass(self, store: Any, epoch: int, ours: Facts) -> None:
        own = self._group.own
        first, theirs = compare(store, f"{self.key}/begun/{self._begun}", own, ours)
        if theirs.get("epoch") != epoch:
            raise Misconfigured(
                f"epoch: rank {own} begins epoch {epoch} as its pass number {self._begun}, and rank {first} began epoch"
                f" {theirs.get('epoch')} as that. Begin each pass in all ranks of the group, resume all from the same"
                " state, and call loader.set_epoch(epoch) in all or in none"
            )
        for name in sorted(ours | theirs):
            if ours.get(name) != theirs.get(name):
                raise Misconfigured(
                    f"{name}: what rank {own} and rank {first} read in epoch {epoch} differs, and they have to get the"
                    " same samples. Load the same state in all ranks of the group, and give all the same sampler"
                )

    def finish(self, store: Any, epoch: int) -> None:
        """A pass was read to its end. Raises ``Misconfigured`` if another rank of the group read another epoch."""
        self._finished += 1
        own = self._group.own
        first, theirs = compare(store, f"{self.key}/finished/{self._finished}", own, {"epoch": epoch})
        if theirs.get("epoch") != epoch:
            raise Misconfigured(
                f"epoch: rank {own} read epoch {epoch} while rank {first} read epoch {theirs.get('epoch')}, and they"
                " have to get the same samples: one of them began a pass alone, perhaps to look at a batch. Begin each"
                " pass in all ranks of the group"
            )
