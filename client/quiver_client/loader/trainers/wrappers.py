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
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, Protocol, cast

from torch.utils.data import DistributedSampler, SequentialSampler

from quiver.substitution import Ints
from quiver_client.loader.epoch import Deal
from quiver_client.loader.trainers.loops import counts_passes

log = logging.getLogger("quiver_client")

ACCELERATE: Final = "accelerate.data_loader"  # the module whose wrappers deal our batches to ranks, or skip some
TRAINER: Final = "transformers.trainer"
BETWEEN: Final = ("torch.utils.data.", "torchdata.", "accelerate.")  # modules that call us on behalf of a wrapper
# Modules that ask all ranks for a state, and keep that of one: Accelerate's, Lightning's, Fabric's.
ONE_STATE: Final = (
    "accelerate.checkpointing",
    *("lightning.pytorch.utilities.combined_loader", "pytorch_lightning.utilities.combined_loader"),
    *("lightning.fabric.strategies.", "lightning_fabric.strategies."),
    "torch.distributed.checkpoint.",
)
FLATTENS: Final = "torch.distributed.checkpoint."  # it stores each value by itself, and loads those that there are now
SHARDED: Final = (
    "these batches are one rank's share, and Accelerate would deal them to the ranks again and lose samples. Pass"
    " Accelerator.prepare the quiver_client.DataLoader, which it leaves unchanged; or let Accelerate alone deal, by"
    " BatchSampler(..., rank=0, world_size=1, substitute=False)"
)
SKIPPED: Final = (
    "a trainer resumes by skipping batches, but which batches come first here depends on what is resident: it would"
    " skip samples that were not read, and read others twice. Save loader.state_dict() with each checkpoint and call"
    " loader.load_state_dict(state) before training resumes: the batches that it counts are then skipped, and no other."
    " The Trainer of Hugging Face does so by itself, with quiver_client.integrations.transformers.QuiverCallback() in"
    " its callbacks, if the checkpoint was saved with it. Or make the order fixed: substitute=False, and"
    " loader.set_epoch(epoch) before batches are skipped; instead of a sampler= that draws again in each pass, a list"
    " that was drawn once"
)
STATEFUL: Final = (
    "use_stateful_dataloader=True saves one rank's state, and resumes by reading again what was read. Pass"
    " Accelerator.prepare the quiver_client.DataLoader: Accelerator.save_state then saves the state of all ranks"
)


@dataclass(frozen=True, slots=True)
class Reader:
    """Who iterates an order, as the calling frames tell: a batch sampler is not told what wraps it."""

    shard: Any = None  # Accelerate's BatchSamplerShard
    dispatcher: Any = None  # its DataLoaderDispatcher, by which rank 0 reads for all
    skipped: int | None = None  # batches that are skipped, to resume
    is_stateful: bool = False  # torchdata's loader asks
    training: FrameType | None = None  # the frame in which Hugging Face's Trainer reads an epoch

    @classmethod
    def of(cls, asking: FrameType | None) -> Reader:
        found: dict[str, Any] = {}
        while asking is not None and (module := str(asking.f_globals.get("__name__"))).startswith((*BETWEEN, TRAINER)):
            if module == ACCELERATE:
                wrapper = cast(Any, asking.f_locals.get("self"))
                kind = type(wrapper).__name__
                if kind == "SkipBatchSampler":
                    found["skipped"] = found.get("skipped", 0) + wrapper.skip_batches
                elif kind in _ROLES:
                    found[_ROLES[kind]] = wrapper
            elif module.startswith("torchdata."):
                found["is_stateful"] = True
            elif module == TRAINER and "resume_from_checkpoint" in asking.f_locals:
                found["training"] = asking
                break
            asking = asking.f_back
        if "dispatcher" in found and found["dispatcher"].skip_batches > 0:
            found["skipped"] = found["dispatcher"].skip_batches
        return cls(**found)

    def skips(self, handed_out: int, *, reproducible: bool) -> int:
        """Return how many batches are skipped that a loaded state counts as handed out: they are not read again.

        Raises ``RuntimeError`` if the batches that are skipped would be others than those. ``reproducible``: the order
        does not depend on what is resident, and is the same in another process.
        """
        if self.skipped is None or (not handed_out and reproducible):
            return 0
        if not handed_out:
            raise RuntimeError(SKIPPED)
        if handed_out != self.skipped:
            raise RuntimeError(
                f"the trainer skips {self.skipped} batches, and the loaded state counts {handed_out} in this epoch."
                " They differ if the number of ranks, the batch size or the gradient accumulation changed: resume with"
                " those of the checkpoint, or without skipping"
            )
        return handed_out

    def check(self, rank: int, world_size: int, *, is_fixed: bool) -> None:
        """Raise ``RuntimeError`` if the wrappers would silently lose samples of the share of this rank.

        ``is_fixed``: each process has the same order.
        """
        if self.dispatcher is not None and world_size > 1:  # rank 0 reads for all: any complete order is correct
            raise RuntimeError(SHARDED)
        if self.shard is None or (is_fixed and world_size == 1):
            return
        if world_size == 1 or not pass_through(self.shard, rank, world_size):
            raise RuntimeError(SHARDED)
        if self.is_stateful:
            raise RuntimeError(STATEFUL)


_ROLES: Final = {"BatchSamplerShard": "shard", "DataLoaderDispatcher": "dispatcher"}


def pass_through(shard: Any, rank: int, world_size: int) -> bool:
    """Have Accelerate's ``BatchSamplerShard`` hand on the batches of an order that is its rank's share already.

    Return ``False``, and change nothing, if the order is of another rank or world size.
    """
    ranks = getattr(shard, "_quiver_ranks", (shard.process_index, shard.num_processes))
    if ranks != (rank, world_size):
        return False
    shard._quiver_ranks = ranks
    shard.num_processes, shard.process_index, shard.split_batches = 1, 0, False
    shard.even_batches = False  # otherwise it would complete the last batch with samples of the first
    return True


def wrapping_shard(asking: FrameType) -> Any:
    """Return the ``BatchSamplerShard`` that is being made over an order, and reads its attributes."""
    if asking.f_globals.get("__name__") != ACCELERATE or asking.f_code.co_name != "__init__":
        return None
    shard = asking.f_locals.get("self")
    return shard if type(shard).__name__ == "BatchSamplerShard" else None


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the Accelerator that prepares a loader does to its batches: where to put them, and in how many parts."""

    device: Any = None
    non_blocking: bool = False
    parts: int = 1  # a batch is split between so many ranks

    @classmethod
    def by(cls, asking: FrameType) -> Prepared | None:
        """Return what the ``Accelerator.prepare_data_loader`` that calls will do; ``None`` for another caller."""
        accelerator: Any = asking.f_locals.get("self")
        placement = asking.f_locals.get("device_placement")
        if asking.f_code.co_name != "prepare_data_loader" or not hasattr(accelerator, "split_batches"):
            return None
        place = accelerator.device_placement if placement is None else placement
        device = accelerator.device if place and accelerator.device.type not in ("cpu", "xla") else None
        parts = accelerator.num_processes if accelerator.split_batches else 1
        return cls(device, bool(accelerator.non_blocking), parts)

    def placed(self, batch: Any) -> Any:
        if self.device is None:
            return batch
        return sys.modules["accelerate.utils"].send_to_device(batch, self.device, non_blocking=self.non_blocking)


def keeps_one_state(asking: FrameType | None) -> bool:
    """Whether the caller, identified by its frame, asks all ranks for a state and keeps that of one rank alone."""
    return _module(asking).startswith(ONE_STATE)


def flattens_states(asking: FrameType | None) -> bool:
    """Whether the caller stores each value of a state by itself, so that only one without a structure is kept whole."""
    return _module(asking).startswith(FLATTENS)


def _module(asking: FrameType | None) -> str:
    """Return the module that calls, beyond the loader's own: what a loader's method does, its order does."""
    while asking is not None and str(asking.f_globals.get("__name__")).startswith("quiver_client."):
        asking = asking.f_back
    return str(asking.f_globals.get("__name__")) if asking is not None else ""


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


class GradientSync:
    """Tells Accelerate which batch is the last of a pass, where it synchronises accumulated gradients.

    Accelerate reads them from the loader registered last: ``end_of_dataloader`` and, at the end, ``remainder``.
    """

    def __init__(self, loader: Any, prepared: Prepared) -> None:
        self.placed = prepared.placed  # puts a batch on the Accelerator's device
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
