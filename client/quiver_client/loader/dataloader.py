"""``DataLoader``: torch's, with an order, prefetching and a state made for reading through a cache."""

from __future__ import annotations

import copy
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, cast

import torch.utils.data
from torch.utils.data._utils.pin_memory import pin_memory

from quiver_client.collated_dataset import CollatedDataset, collated
from quiver_client.dataset import Dataset
from quiver_client.loader.arguments import whole
from quiver_client.loader.epoch import Drawn, Epoch
from quiver_client.loader.sampler import DISPLACED, BatchSampler
from quiver_client.loader.state import State
from quiver_client.loader.threads import ThreadedBatches
from quiver_client.loader.trainers import GradientSync, Share, warn_of_repeats
from quiver_client.loader.workers import NumberedBatches, WorkerBatches
from quiver_client.memory import keep_what_is_freed

PREFETCH_BATCHES: Final = 2
Batches = ThreadedBatches | NumberedBatches


class DataLoader(torch.utils.data.DataLoader[Any]):
    """A ``torch.utils.data.DataLoader`` that decides by residency which samples come next.

        loader = DataLoader(Dataset("imagenet.quiver"), batch_size=256, shuffle=True)
        for epoch in range(90):
            for batch in loader: ...

    Without a ``transform`` and a ``collate_fn`` a batch is a dictionary of columns, as torch's collation makes it of
    the samples: tensors of numbers, lists of bytes; and fields of arrays of one shape (lists in Parquet, ``.npy``
    files) are stacked into one tensor ``(batch, *shape)``, without a Python step per sample.

    All arguments of torch's are accepted. With ``num_workers=0`` threads of this process fetch, transform and collate
    ``prefetch_factor`` batches ahead (2 if not given); a random ``transform`` then shares the global generators with
    the training loop. Each pass is one epoch and the next pass the next one, whether or not ``set_epoch`` is called.

    ``substitute``: draw resident samples first and the others later in the same epoch, each exactly once; ``False``:
    the order is the seeded permutation, bit for bit. Without ``shuffle`` or with a ``sampler`` the order is fixed, too.
    ``lookahead``: among how many pending samples a batch may choose; ``"auto"``: the whole epoch.
    ``seed``: of the permutation; the same in all ranks. ``rank``, ``world_size``: by default torch.distributed's, else
    torchrun's, as they are when the first pass begins; every rank gets as many samples as any other, by repeating a few
    or, with ``drop_last``, by leaving out a few, as torch's ``DistributedSampler`` does. ``job``: a name that is the
    same in all ranks: a job that restarts under its name replaces its earlier run; without it, a restart waits for the
    old lease to expire. ``ledger``: a file to record the order in; ``replay``: such a file, whose order is repeated,
    independent of what the cache holds. With several ranks each has its own file, with ``.<rank>`` appended.
    ``mesh``: a ``DeviceMesh``; ranks that differ in other dimensions than the data-parallel ones (``dp``, ``dp_shard``,
    …; or ``mesh=(device_mesh, ("x", "y"))``) get the same samples in the same order. ``replicate``: a process group
    whose ranks do. Rank and world size follow from either; one rank of each group decides (docs/replicas.md).

    Raises ``ValueError`` naming the argument that is wrong, and what ``Dataset`` raises while reading.
    """

    end_of_dataloader = False  # read by Accelerate: the batch handed out was the last one of its pass
    _warned_of_repeats = False

    def __init__(  # noqa: PLR0913, PLR0917 - torch's own arguments, and ours
        self,
        dataset: Dataset,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[int] | None = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        substitute: bool = True,
        lookahead: int | str = "auto",
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        job: str | None = None,
        ledger: str | None = None,
        replay: str | None = None,
        mesh: Any = None,
        replicate: Any = None,
        **stock: Any,
    ) -> None:
        if batch_sampler is not None:
            raise ValueError(
                "batch_sampler: this loader composes its batches itself; give batch_size. Where a trainer inserts a"
                " batch sampler of its own (Lightning's predict does), give it torch's DataLoader over the dataset"
            )
        if batch_size is None:
            raise ValueError("batch_size=None: this loader reads by the batch; give a size, or use torch's DataLoader")
        if sampler is not None and shuffle:
            raise ValueError("sampler: it determines the order; give either sampler or shuffle")
        for name, file in (("ledger", ledger), ("replay", replay)):
            if file is not None and not stock.get("in_order", True):
                raise ValueError(f"{name}: it needs a defined order of batches, which in_order=False does not give")
        if prefetch_factor is not None:
            prefetch_factor = whole("prefetch_factor", prefetch_factor, 1)
        order = BatchSampler(
            dataset,
            batch_size,
            shuffle=bool(shuffle),
            drop_last=drop_last,
            substitute=substitute,
            lookahead=lookahead,
            seed=seed,
            rank=rank,
            world_size=world_size,
            job=job,
            ledger=ledger,
            replay=replay,
            sampler=sampler,
            mesh=mesh,
            replicate=replicate,
            timeout=timeout,
        )
        self.order = order
        # If no sample is processed by itself, a batch is made by columns.
        by_columns = collate_fn is None and CollatedDataset.can_read(dataset)
        self._source: Dataset | CollatedDataset = CollatedDataset(dataset) if by_columns else dataset
        self.epoch: Epoch | None = None  # what the workers draw from
        self._ahead = prefetch_factor or PREFETCH_BATCHES
        super().__init__(
            dataset,
            order.deal.batch_size,  # an integer of torch's or numpy's is accepted, too
            sampler=cast(Any, Share(order) if sampler is None else sampler),
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=prefetch_factor if num_workers else None,
            **stock,
        )
        self._collate = collated if by_columns else self.collate_fn
        self.__dict__["batch_sampler"] = order  # torch rejects it together with a batch_size, which users read
        # A weak reference: the pass's threads refer to this loader, so a pass dropped midway would never end.
        self._passing: weakref.ref[_Pass] | None = None

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Read by Accelerate, which then leaves the loader unchanged: each rank has its share already.

        Raises ``ValueError`` naming ``sampler`` if each rank would read all of it.
        """
        self.order.check_shares()
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool) -> None:
        """Accept the mark that Accelerate sets on its own loaders. It changes nothing."""

    @property
    def remainder(self) -> int:
        """How many samples of the last batch Accelerate's ``gather_for_metrics`` keeps; 0 for all of them."""
        if not self._warned_of_repeats:
            self._warned_of_repeats = True
            warn_of_repeats(self.order.deal)
        return 0

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, the same in every rank.

        In a resumed epoch it is larger if more batches than that were handed out before or are left.
        """
        return len(self.order)

    def __iter__(self) -> Any:
        before = self._passing() if self._passing is not None else None
        if before is not None:
            before.displaced = before.reading
        self._end_pass()
        if self.pin_memory and not self.num_workers and not torch.accelerator.is_available():
            warnings.warn("pin_memory=True: there is no accelerator, so nothing is pinned", stacklevel=2)
        epoch = self.order.begin()
        self.epoch = epoch
        if self.num_workers:
            batches: Batches = NumberedBatches(cast(WorkerBatches, super().__iter__()))
        else:
            keep_what_is_freed()
            batches = ThreadedBatches(self.order, epoch, self._fetch, self._ahead, self.timeout)
        passing = _Pass(self.order, epoch, batches, GradientSync(self))
        self._passing = weakref.ref(passing)
        return passing

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass read this epoch, or what a loaded state left of it."""
        self.order.set_epoch(epoch)

    def state_dict(self) -> State:
        """Return what was handed out so far: a plain dictionary of under 0.2 bytes per sample. See ``merge_states``."""
        return self.order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next pass resume where ``state`` was taken, with any number of workers.

        The state of one of several ranks fits the same rank of the same world size; if it was taken at the end of an
        epoch, it fits any rank. A state of ``merge_states`` fits any world size. If a ``sampler`` gives the order, each
        rank loads its own. Raises ``ValueError`` with the reason if it is of another dataset, seed or version.
        """
        self.order.load_state_dict(state)

    def close(self) -> None:
        """Stop prefetching and withdraw the reported needs. The loader can be iterated again, and its state stays."""
        self._end_pass()
        self.order.close()

    def _end_pass(self) -> None:
        passing = self._passing() if self._passing is not None else None
        if passing is not None:
            passing.close()

    def _get_iterator(self) -> Any:
        self.check_worker_number_rationality()
        reading = copy.copy(self)
        reading.__dict__.update(dataset=self._source, collate_fn=self._collate)  # torch forbids setting them
        return WorkerBatches(reading)

    def _fetch(self, drawn: Drawn) -> Any:
        batch = self._collate(cast(Any, self._source.__getitems__(cast(Any, drawn.rows))))
        if self.pin_memory and torch.accelerator.is_available():
            return pin_memory(batch)  # type: ignore[no-untyped-call]
        return batch


class _Pass:
    """The iterator of the training loop: counts a batch as consumed when it hands it out."""

    def __init__(self, order: BatchSampler, epoch: Epoch, batches: Batches, sync: GradientSync) -> None:
        self._order, self._epoch, self._sync = order, epoch, sync
        self.displaced = False
        self._batches: Batches | None = batches
        self._dropped = weakref.finalize(self, _drop, order, epoch, batches, sync)
        self._dropped.atexit = False
        sync.begin()

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        if self._batches is None and not self.displaced:
            raise StopIteration
        if self._batches is None or not self._order.is_current(self._epoch):
            raise RuntimeError(DISPLACED)
        begun = time.monotonic()
        self._order.asked()
        try:
            number, batch = next(self._batches)
        except StopIteration:
            self._batches = None
            self._sync.end()
            self._dropped.detach()
            self._order.end(self._epoch)
            raise
        self._order.consumed(self._epoch, number, time.monotonic() - begun)
        if self._epoch.finished:
            self._sync.last()
        return batch

    def __len__(self) -> int:
        return len(self._order)

    @property
    def reading(self) -> bool:
        """Whether the pass has not reached its end."""
        return self._batches is not None

    def close(self) -> None:
        batches, self._batches = self._batches, None
        if batches is not None:
            self._sync.end()
            self._dropped.detach()
            self._order.abandon(self._epoch)
            batches.close()


def _drop(order: BatchSampler, epoch: Epoch, batches: Batches, sync: GradientSync) -> None:
    """End a pass that was garbage-collected, in any thread, so without waiting: ``close`` could wait for itself."""
    sync.end()
    order.abandon(epoch)
    batches.close(wait=False)
