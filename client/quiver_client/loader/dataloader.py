"""``DataLoader``: torch's, with an order, prefetching and a state made for reading through a cache."""

from __future__ import annotations

import copy
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, cast

import torch.utils.data
from torch.utils.data import default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from quiver_client.collated_dataset import CollatedDataset, collated
from quiver_client.loader.arguments import whole
from quiver_client.loader.bad_samples import CompleteBatches, ErrorLog, ErrorPolicy
from quiver_client.loader.copies import described, order_again
from quiver_client.loader.loop_pass import Batches, LoopPass
from quiver_client.loader.making import Making
from quiver_client.loader.order import OrderPass
from quiver_client.loader.probing import Prober
from quiver_client.loader.profile import Profile
from quiver_client.loader.progress import ProgressLine, is_wanted
from quiver_client.loader.sampler import BatchSampler
from quiver_client.loader.source import Source, ThreadedSource
from quiver_client.loader.state import State
from quiver_client.loader.threads import FETCHERS, ThreadedBatches
from quiver_client.loader.trainers.injected import SeenBatches, order_of
from quiver_client.loader.trainers.loops import is_counter, reads_one_ahead
from quiver_client.loader.trainers.own_methods import own_methods
from quiver_client.loader.trainers.wrappers import GradientSync, Prepared, Reader, warn_of_repeats
from quiver_client.loader.turns import Turns
from quiver_client.loader.wait_warning import LoopWatch
from quiver_client.loader.workers import NumberedBatches, WorkerBatches
from quiver_client.memory import keep_what_is_freed

PREFETCH_BATCHES: Final = 2


class DataLoader(torch.utils.data.DataLoader[Any]):
    """A ``torch.utils.data.DataLoader`` that decides by residency which samples come next.

        loader = DataLoader(Dataset("imagenet.quiver"), batch_size=256, shuffle=True)
        for epoch in range(90):
            for batch in loader: ...

    Without a ``transform`` and a ``collate_fn`` a batch is a dictionary of columns, as torch's collation makes it of
    the samples: tensors of numbers, lists of bytes; and fields of arrays of one shape (lists in Parquet, ``.npy``
    files) are stacked into one tensor ``(batch, *shape)``, without a Python step per sample.

    All arguments of torch's are accepted. With ``num_workers=0`` threads of this process fetch, transform and collate
    ``prefetch_factor`` batches ahead (2 if not given). What a random ``transform`` draws for a sample follows from
    (seed, epoch, sample), in threads and in workers (docs/transforms.md). Each pass is one epoch and the next pass the
    next one, whether or not ``set_epoch`` is called.

    ``substitute``: draw resident samples first and the others later in the same epoch, each exactly once; ``False``:
    the order is the seeded permutation, bit for bit. Without ``shuffle`` or with a ``sampler`` the order is fixed, too.
    ``shuffle``: ``True`` or ``"full"`` mixes all samples. ``"block"`` reads the shards in random order and mixes the
    samples of ``block_shards`` of them at a time (by default 16, or 64 where a shard's samples stood together in the
    origin; fewer in small datasets): a fixed order whose shards are needed once and briefly, for tokens that are packed
    in order and whoever cannot substitute (docs/shuffles.md). ``substitute`` does not apply to it.
    ``lookahead``: among how many pending samples a batch may choose; ``"auto"``: the whole epoch.
    ``seed``: of the permutation; the same in all ranks. ``rank``, ``world_size``: by default torch.distributed's, else
    torchrun's, as they are when the first pass begins; every rank gets as many samples as any other, by repeating a few
    or, with ``drop_last``, by leaving out a few, as torch's ``DistributedSampler`` does. ``job``: a name that is the
    same in all ranks: a job that restarts under its name replaces its earlier run; without it, a restart waits for the
    old lease to expire. ``group``: a name that the trials of a sweep share: in the cache they count as one. ``tenant``:
    who is charged, where the cache needs no tokens; a token's tenant counts before it. Operators see all three; by
    default they are ``$QUIVER_JOB``, ``$QUIVER_GROUP`` and ``$QUIVER_TENANT``, and the job's name else its launcher's
    (docs/identity.md). ``ledger``: a file to record the order in; ``replay``: such a file, whose order is repeated,
    independent of what the cache holds. With several ranks each has its own file, with ``.<rank>`` appended.
    ``mesh``: a ``DeviceMesh``; ranks that differ in other dimensions than the data-parallel ones (``dp``, ``dp_shard``,
    …; or ``mesh=(device_mesh, ("x", "y"))``) get the same samples in the same order. ``replicate``: a process group
    whose ranks do. Rank and world size follow from either; one rank of each group decides (docs/replicas.md).
    ``on_error``: what to do about a sample whose ``transform`` raises, or that the origin has lost: ``"raise"`` the
    error; ``"skip"`` the sample, so that its batch is shorter; or ``"replace"`` it by another pending sample, so that
    batches stay whole (but the last ones, where a ``sampler`` is read while the loop runs). Each is named in the log
    and counted as consumed. Where nothing is pending a good sample is repeated if there are several ranks, or with
    ``drop_last``. ``errors_max``: how many bad samples an epoch may have, or which fraction of the rank's samples; by
    default one in a thousand and at least one. Beyond it a ``RuntimeError`` names them all (docs/transforms.md).
    ``probe``: once, and for at most 1 % of the time, have twenty batches read past the cache, in rank 0, to measure
    what the cache is worth to this job; ``profile().probed`` has the result (docs/profiling.md).
    ``progress``: show, on a terminal and in rank 0, a line while the first epoch fills the cache; ``None``: unless
    ``$QUIVER_PROGRESS`` is 0. ``batch_sampler``: a ``quiver_client.BatchSampler``, which then determines the order.

    Several loops may iterate one loader at once, to validate within an epoch for instance: each iterator hands out a
    whole pass, and ``state_dict`` is that of the outer loop (a ``Mix`` has one pass at a time). A warning is logged,
    once, if the loop waits for data more than a tenth of its time. A loader can be pickled, for processes that a
    trainer spawns, and deep-copied: the copy has its arguments and its state, so it goes on where that says.

    Raises ``ValueError`` naming the argument that is wrong, and what ``Dataset`` raises while reading.
    """

    end_of_dataloader = False  # read by Accelerate: the batch handed out was the last one of its pass
    use_stateful_dataloader = True  # read by Accelerate: save_state and load_state include the loader's state
    _warned_of_repeats = False
    _prepared = Prepared()

    def __init__(  # noqa: PLR0913, PLR0917 - torch's own arguments, and ours
        self,
        dataset: torch.utils.data.Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | str | None = None,
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
        group: str | None = None,
        tenant: str | None = None,
        ledger: str | None = None,
        replay: str | None = None,
        mesh: Any = None,
        replicate: Any = None,
        block_shards: int | None = None,
        progress: bool | None = None,
        on_error: str = "raise",
        errors_max: float | None = None,
        probe: bool = False,
        **stock: Any,
    ) -> None:
        if batch_size is None:
            raise ValueError("batch_size=None: this loader reads by the batch; give a size, or use torch's DataLoader")
        if sampler is not None and shuffle:
            raise ValueError("sampler: it determines the order; give either sampler or shuffle")
        for name, file in (("ledger", ledger), ("replay", replay)):
            if file is not None and not stock.get("in_order", True):
                raise ValueError(f"{name}: it needs a defined order of batches, which in_order=False does not give")
        if prefetch_factor is not None:
            prefetch_factor = whole("prefetch_factor", prefetch_factor, 1)
        self._on_error = ErrorPolicy.parsed(on_error, errors_max)
        self._errors = ErrorLog(self._on_error)
        if batch_sampler is not None:
            others = batch_size != 1, bool(shuffle), sampler is not None, drop_last
            order = order_of(batch_sampler, dataset, *others)
        else:
            order = BatchSampler(
                dataset,
                batch_size,
                shuffle=False if shuffle is None else shuffle,
                drop_last=drop_last,
                substitute=substitute,
                lookahead=lookahead,
                seed=seed,
                rank=rank,
                world_size=world_size,
                job=job,
                group=group,
                tenant=tenant,
                ledger=ledger,
                replay=replay,
                sampler=sampler,
                mesh=mesh,
                replicate=replicate,
                timeout=timeout,
                block_shards=block_shards,
            )
        if self._on_error.is_tolerant and not order.can_replace:
            raise ValueError("on_error: a mixture raises; let the parts' transforms return something for a bad sample")
        if self._on_error.is_tolerant and order.is_in_group:
            raise ValueError(
                f"on_error={on_error!r}: with mesh or replicate, ranks that have to get the same samples could skip or"
                " replace different ones; have the transform return something for a bad sample, or find the bad ones"
                " with quiver verify --decode"
            )
        self.order = order
        # If no sample is processed by itself, a batch is made by columns.
        by_columns = collate_fn in (None, default_collate) and CollatedDataset.can_read(order.samples)
        self.epoch: OrderPass | None = None  # what the workers draw from
        self._ahead = prefetch_factor or PREFETCH_BATCHES
        super().__init__(
            dataset,
            order.deal.batch_size,  # an integer of torch's or numpy's is accepted, too
            sampler=cast(Any, order.sampler),
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=order.deal.drop_last,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=prefetch_factor if num_workers else None,
            **stock,
        )
        # torch rejects it together with a batch_size, which users read
        self.__dict__["batch_sampler"] = batch_sampler if batch_sampler is not None else order
        self._by_columns = by_columns
        self._probes = probe
        self._progress = progress
        is_wanted(progress, 0)
        self._set_up()

    def _set_up(self) -> None:
        """Make what belongs to this process: what makes batches, and what measures."""
        order = self.order
        self._source = Source(
            order.samples,
            self.collate_fn,
            order.deal.seed,
            by_columns=self._by_columns,
            is_tolerant=self._on_error.is_tolerant,
        )
        # Weak references: a pass's threads refer to this loader, so a pass dropped midway would never end.
        self._passing: list[weakref.ref[LoopPass]] = []
        self._seen = SeenBatches(self.batch_sampler)
        self._watch = LoopWatch(order, self.num_workers)
        self._making = making = Making(self.num_workers, min(self._ahead, FETCHERS))
        self._source.rows = making.rows
        # Neither refers to this loader: in a cycle it would be collected late, and with it the threads of its passes.
        self._prober = Prober(lambda: making.costs, lambda: order.is_probe_wanted)
        self._told_series = 0
        self._line: ProgressLine | None = None
        self.__dict__.update(own_methods(self))

    def __getstate__(self) -> dict[str, Any]:
        return described(self.__dict__)

    def __setstate__(self, description: dict[str, Any]) -> None:
        order = order_again(description["order"])
        prepared: Prepared = description.get("_prepared", self._prepared)
        if prepared.parts > 1:
            order.split(prepared.parts)
        # torch forbids setting some of them
        self.__dict__.update(
            description, order=order, batch_sampler=order, sampler=order.sampler, epoch=None, _iterator=None
        )
        self._set_up()

    def __copy__(self) -> DataLoader:
        """Return another view of the same passes, as torch's copy of a loader is."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Read by Accelerate, which then leaves the loader unchanged: each rank has its share already.

        What Accelerate would do otherwise the loader does: it puts batches on the Accelerator's device, and with
        ``split_batches`` splits a batch between the ranks. Raises ``ValueError`` naming ``sampler`` if each rank would
        read all of it.
        """
        self.order.check_shares()
        prepared = Prepared.by(sys._getframe(1))
        if prepared is not None:
            self.order.split(prepared.parts)
            self._prepared = prepared
            self.__dict__["batch_size"] = self.order.deal.batch_size  # torch forbids setting it
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool) -> None:
        """Accept the mark that Accelerate sets on its own loaders. It changes nothing."""

    @property
    def remainder(self) -> int:
        """How many samples of the ranks' last batches Accelerate's ``gather_for_metrics`` keeps; 0 for all of them."""
        kept = self.order.kept_of_last
        if kept is None and not self._warned_of_repeats:
            self._warned_of_repeats = True
            warn_of_repeats(self.order.deal)
        return kept or 0

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, the same in every rank.

        In a resumed epoch it is larger if more batches than that were handed out before or are left.
        """
        return len(self.order)

    def __iter__(self) -> Any:
        asking = sys._getframe(1)
        if self.pin_memory and not self.num_workers and not torch.accelerator.is_available():
            warnings.warn("pin_memory=True: there is no accelerator, so nothing is pinned", stacklevel=2)
        if is_counter(asking):
            self.order.count_on()
        self.order.attend(Reader.of(asking))
        epoch = self.order.begin()
        self.epoch = epoch
        if self._probes and self.order.deal.rank == 0:
            self._probes = False
            self._prober.begin()
        samples = epoch.pending
        if self._on_error.on_error == "replace":
            self.order.hold_last(epoch)
        if self.num_workers:
            # Persistent workers serve one pass at a time: one that begins within another has workers of its own.
            workers = self._get_iterator() if self.persistent_workers and self._open_passes() else super().__iter__()
            batches: Batches = NumberedBatches(cast(WorkerBatches, workers))
        else:
            keep_what_is_freed()
            source = ThreadedSource(
                self._source, epoch.number, self._pinned, self._watch.fetched, self._making, self.is_probe
            )
            batches = ThreadedBatches(self.order, epoch, source, self._ahead, self.timeout)
        if self._on_error.is_tolerant:
            self._errors.begin(samples)
            replaces = self._on_error.on_error == "replace"
            batches = CompleteBatches(
                batches, self.order, epoch, self._source, self._errors, replaces=replaces, finish=self._pinned
            )
        sync = GradientSync(self, self._prepared)
        passing = LoopPass(self.order, epoch, batches, sync, reads_ahead=reads_one_ahead(asking))
        passing.tell(self._watch, self._seen, self._show_progress(), Turns(self._making))
        self._passing = [weakref.ref(each) for each in (*self._open_passes(), passing)]
        return passing

    def _show_progress(self) -> ProgressLine | None:
        """Return the line that shows the first fill, ``None`` if none is wanted."""
        if self._line is None and is_wanted(self._progress, self.order.deal.rank):
            self._line = ProgressLine()
            self.order.show_first_fill(self._line)
        return self._line

    def profile(self) -> Profile:
        """Return how fast this rank's loop reads, what it could read, and where its time goes (docs/profiling.md).

            print(loader.profile())                  # a table
            loader.profile().possible_rate           # f*, bytes per second that it would read if it never waited
            loader.profile().as_dict()               # for JSON

        Measured all the time, at about twenty microseconds per batch; rates are of the last seconds of the loop.
        """
        deal = self.order.deal
        rank = deal.rank, deal.world_size
        return Profile.of(self.order.speeds, self._prober.costs, rank=rank, makers=self._making.makers)

    @property
    def is_probing(self) -> bool:
        """Whether a series of probes has begun and has not ended."""
        return self._prober.is_on

    def is_probe(self) -> bool:
        """Return whether the next batch is to be read past the cache. Called by what makes batches."""
        prober = self._prober
        is_probe = prober.take()
        if self._told_series != prober.series:
            probed = self.profile().probed
            if probed is not None or prober.has_failed:  # a loop that has hardly begun has no speed yet
                self._told_series = prober.series
                self.order.tell_probed(probed)
        return is_probe

    def stats(self) -> dict[str, int]:
        """Return the counters of this process, as ``dataset.stats()`` does, ``skipped`` and ``replaced`` among them:
        samples that ``on_error`` left out, or had another one take the place of."""
        counters: Counter[str] = Counter()
        for leaf in self.order.leaves:
            counters.update(leaf.stats())
        return dict(counters)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass read this epoch, or what a loaded state left of it."""
        self.order.set_epoch(epoch)

    def state_dict(self, *, merged: bool = False) -> State:
        """Return what was handed out so far: a plain dictionary of under 0.2 bytes per sample. See ``merge_states``.

        ``merged=True``: the merged state of all ranks, for a checkpoint that rank 0 alone writes. Call it in all ranks,
        at the same point of training: each returns the same state, which loads into any world size. It raises in all of
        them if one raises, and ``TimeoutError`` if a rank has not called it for ten minutes. Without torch.distributed
        it is ``merge_states([loader.state_dict()])``.
        """
        return self.order.state_dict(merged=merged)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next pass resume where ``state`` was taken, with any number of workers.

        The state of one of several ranks fits the same rank of the same world size; if it was taken at the end of an
        epoch, it fits any rank. A state of ``merge_states`` fits any world size. If a ``sampler`` gives the order, each
        rank loads its own. Raises ``ValueError`` with the reason if it is of another dataset, seed or version.
        """
        self.order.load_state_dict(state)

    def close(self) -> None:
        """Stop prefetching and withdraw the reported needs. The loader can be iterated again, and its state stays."""
        for passing in reversed(self._open_passes()):  # the outermost loop's last: the state stays that one's
            passing.close()
        self.order.close()

    def _open_passes(self) -> list[LoopPass]:
        """Return the passes that loops read, the oldest first: nested loops, or iterators that were kept."""
        return [each for each in (refer() for refer in self._passing) if each is not None and each.reading]

    def _get_iterator(self) -> Any:
        self.check_worker_number_rationality()
        reading = copy.copy(self)
        reading.__dict__.update(dataset=self._source, collate_fn=collated)  # torch forbids setting them
        return WorkerBatches(reading)

    def _pinned(self, batch: Any) -> Any:
        if self.pin_memory and torch.accelerator.is_available():
            return pin_memory(batch)  # type: ignore[no-untyped-call]
        return batch
