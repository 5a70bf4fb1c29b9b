"""The attributes of a loader that trainers read, and the check that rejects wrappers which would lose samples silently.

Accelerate, Lightning and the Trainer of Hugging Face look at a loader's attributes to find out whether it already gives
each rank a share. Ours does, and says so in each trainer's terms: a ``sampler`` that is a ``DistributedSampler``, and
Accelerate's own mark. Wrappers that would deal or skip our batches a second time are rejected (docs/adr/0020).
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final, Protocol

from torch.utils.data import DistributedSampler, SequentialSampler

from quiver.substitution import Ints
from quiver_client.loader.epoch import Deal
from quiver_client.loader.trainer_loops import counts_passes

log = logging.getLogger("quiver_client")

WRAPPERS: Final = "accelerate.data_loader"  # the module whose wrappers deal our batches to ranks, or skip some
# Modules that ask all ranks for a state, and keep that of one: Accelerate's, Lightning's, Fabric's.
ONE_STATE: Final = (
    "accelerate.checkpointing",
    *("lightning.pytorch.utilities.combined_loader", "pytorch_lightning.utilities.combined_loader"),
    *("lightning.fabric.strategies.", "lightning_fabric.strategies."),
)
STOCK: Final = ("torch.utils.data.", "torchdata.")  # loaders that call us on behalf of a wrapper
SHARDED: Final = (
    "these batches are one rank's share, and Accelerate would deal them to the ranks again and lose samples. Pass"
    " Accelerator.prepare the quiver_client.DataLoader, which it leaves unchanged; or let Accelerate alone deal, by"
    " BatchSampler(..., rank=0, world_size=1, substitute=False)"
)
SKIPPED: Final = (
    "a trainer resumes by skipping batches, but which batches come first here depends on what is resident: it would"
    " skip samples that were not read, and read others twice. Save loader.state_dict() with each checkpoint and call"
    " loader.load_state_dict(state) before training resumes (with ignore_data_skip=True where the Trainer of Hugging"
    " Face resumes), or make the order fixed: substitute=False, and loader.set_epoch(epoch) before batches are skipped;"
    " instead of a sampler= that draws again in each pass, a list that was drawn once"
)


def keeps_one_state(asking: FrameType | None) -> bool:
    """Whether the caller, identified by its frame, asks all ranks for a state and keeps that of one rank alone."""
    while asking is not None and str(asking.f_globals.get("__name__")).startswith("quiver_client."):
        asking = asking.f_back  # what a loader's method does, its order does
    return asking is not None and str(asking.f_globals.get("__name__")).startswith(ONE_STATE)


class SharedOrder(Protocol):
    """The attributes of an order that a share of it reads."""

    @property
    def deal(self) -> Deal: ...
    @property
    def epoch(self) -> int: ...
    def set_epoch(self, epoch: int) -> None: ...
    def share(self, epoch: int) -> Ints: ...


class Share(DistributedSampler[Any]):
    """A rank's share of the epoch, as ``loader.sampler``: it shows that samples are already dealt to the ranks.

    Iterated by itself it yields the share in the order of the permutation, independent of what is resident.
    ``set_epoch`` is the loader's. It has the attributes of torch's class, and reads them from the loader's order.
    """

    def __init__(self, order: SharedOrder) -> None:
        self._order = order  # no super().__init__(): it would fix the rank before the first pass

    def __getattr__(self, name: str) -> Any:
        if name in ("seed", "shuffle", "drop_last", "rank"):
            return getattr(self._order.deal, name)
        if name == "num_replicas":
            return self._order.deal.world_size
        if name in ("dataset", "epoch"):
            return getattr(self._order, name)
        if name == "num_samples":
            return self._order.deal.share_samples
        if name == "total_size":
            return self.num_samples * self.num_replicas
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __iter__(self) -> Iterator[int]:
        return iter(self._order.share(self.epoch).tolist())

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        if not counts_passes(sys._getframe(1)):
            self._order.set_epoch(epoch)


class SequentialShare(Share, SequentialSampler):
    """A share that is not shuffled: trainers tell that by this class, and would else switch shuffling off."""

    @property
    def data_source(self) -> Any:
        return self.dataset

    @data_source.setter
    def data_source(self, dataset: Any) -> None:
        """Accept what torch's constructor sets."""


def share_of(order: SharedOrder) -> Share:
    """Return the rank's share of an order, as a sampler."""
    return Share(order) if order.deal.shuffle else SequentialShare(order)


def refuse_wrapper(asking: FrameType | None, deal: Deal, *, fixed: bool, known: bool) -> None:
    """Raise ``RuntimeError`` if the caller, identified by its frame, would silently lose samples of these batches.

    ``fixed``: their order does not depend on what is resident; ``known``: another process would read the same order.
    """
    wrappers: dict[str, Any] = {}
    while asking is not None and str(module := asking.f_globals.get("__name__")).startswith((WRAPPERS, *STOCK)):
        if module == WRAPPERS:
            wrapper = asking.f_locals.get("self")
            wrappers[type(wrapper).__name__] = wrapper
        asking = asking.f_back
    dispatcher = wrappers.get("DataLoaderDispatcher")
    skips = "SkipBatchSampler" in wrappers or getattr(dispatcher, "skip_batches", 0) > 0
    if skips and not (fixed and known):
        raise RuntimeError(SKIPPED)
    if "BatchSamplerShard" in wrappers and not (fixed and deal.world_size == 1):
        raise RuntimeError(SHARDED)
    if dispatcher is not None and deal.world_size > 1:  # rank 0 reads for all ranks: any complete order is correct
        raise RuntimeError(SHARDED)


class GradientSync:
    """Tells Accelerate which batch is the last of a pass, where it synchronises accumulated gradients.

    Accelerate reads them from the loader registered last: ``end_of_dataloader`` and, at the end, ``remainder``.
    """

    def __init__(self, loader: Any) -> None:
        self._refer = weakref.ref(loader)  # a pass may end by being collected, and its loader may refer to it
        self._state: Any = None

    def begin(self) -> None:
        self._tell(False)
        module = sys.modules.get("accelerate.state")  # a program that does not use it has not imported it
        if module is not None:
            self._state = module.GradientState()
            self._state._add_dataloader(self._refer())

    def handed_out(self, *, is_last: bool) -> None:
        """A batch is handed out. Another pass of the loader may have said otherwise meanwhile."""
        self._tell(is_last)

    def end(self) -> None:
        state, self._state = self._state, None
        if state is not None:
            state._remove_dataloader(self._refer())

    def _tell(self, is_last: bool) -> None:
        loader = self._refer()
        if loader is not None:
            loader.end_of_dataloader = is_last


def warn_of_repeats(deal: Deal) -> None:
    """Warn that metrics gathered from all ranks count some samples twice, at unknown positions."""
    repeated = 0 if deal.drop_last else -deal.samples % deal.world_size
    if repeated:
        log.warning(
            "gather_for_metrics: %d of %d samples are in it twice, so that every rank has the same number; give the"
            " loader drop_last=True, or tell samples apart by __key__",
            repeated,
            deal.samples,
        )
