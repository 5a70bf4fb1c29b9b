"""``Dataset``: a map-style torch dataset whose bytes come through the cache.

It is a description (where the manifest is, where the cache is, which fields to read), so it pickles in a few bytes and
survives a fork; each process opens a session of its own on first use.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, Self, get_args, overload

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset as TorchDataset

from quiver import forks
from quiver.errors import Changed
from quiver.manifest import KEY_FIELD, Manifest
from quiver.plan import plan_batch
from quiver_client.batch import Batch, Verify
from quiver_client.config import parse_cache
from quiver_client.failure import Named
from quiver_client.fields import Feature, Fields, Sample, features_of
from quiver_client.identity import introduction_of, name_of
from quiver_client.joined import How, Joined, join
from quiver_client.loaded import Loaded, LoadedByMethod, LoadedRows, made
from quiver_client.manifest_download import open_manifest
from quiver_client.needs_reporter import NeedsChannel
from quiver_client.opened import Opened
from quiver_client.orphans import watch_parent_of_worker
from quiver_client.placement import Placement
from quiver_client.readable import Readable, identity_of_rows, is_all
from quiver_client.seeding import Seeds, seeds_of
from quiver_client.selection import Columns, Ints, Rows
from quiver_client.session import Session
from quiver_client.summary import summary


class Dataset(Readable):
    """Samples of an indexed dataset, read through a cache.

    ``manifest`` is the path or URL of a manifest made by ``quiver index``. ``cache`` is ``http://node:7717,…`` for a
    rack, ``file:///folder?capacity=200GiB`` for a folder of this machine, by default ``$QUIVER_CACHE`` or else
    ``~/.cache/quiver``. ``fields`` chooses fields, ``"__key__"`` among them. ``transform`` is applied to each sample's
    dictionary. ``verify``: ``"fast"`` compares XXH3-64 of every field handed out, ``"full"`` BLAKE3 of every sample,
    ``"off"`` nothing (shards are always verified when they are filled). XXH3 detects accidents and is no defence: any
    member of the ring, or machine on the network to it, can forge a sample of equal XXH3 in milliseconds. So ``"auto"``
    is fast for bytes of this host's own store and of daemons that TLS has authenticated (``https://``), and full for
    all others, of which it reads samples whole, whichever fields are chosen. ``copy=False`` hands byte fields out as
    read-only ``memoryview`` instead of ``bytes``: of a shard on this machine, its mapped file itself. A view keeps the
    buffer or the mapping that it is part of alive, and is for a ``transform`` or a collate function: sent to another
    process, as by a loader's worker, it arrives as ``bytes``. It was readable when it was verified, or with
    ``verify="off"`` when it was mapped; if the file of a shard is truncated afterwards, or its disk fails, touching the
    view ends the process by SIGBUS. Copied bytes are safe from that: they are read again, from another source.

    ``dataset[i]`` is ``transform({"image": bytes, "label": 3, ...})``; a field that the sample lacks is ``None``, and a
    column of lists (tokens, say) is a ``numpy.ndarray``. Raises ``IndexError``; ``Changed`` if the origin lost a
    sample; ``Unavailable`` if neither cache nor origin answers for ``$QUIVER_ORIGIN_PATIENCE`` (5 minutes).
    ``StopIteration`` and ``IndexError`` of a ``transform`` become a ``RuntimeError`` that names the sample: a loop
    would take them for the end of the dataset.
    """

    def __init__(
        self,
        manifest: str | os.PathLike[str],
        cache: str | None = None,
        *,
        fields: Sequence[str] | None = None,
        transform: Callable[[Sample], Any] | None = None,
        verify: Verify = "auto",
        copy: bool = True,
    ) -> None:
        if verify not in get_args(Verify):
            raise ValueError(f"verify={verify!r}: choose auto, fast, full or off")
        opened = open_manifest(os.fspath(manifest))
        self._cache = parse_cache(cache)
        self._verify: Verify = verify
        self._transform = transform
        self._copy = copy
        introduction = introduction_of(name_of(opened, os.fspath(manifest)))
        self._opened = Opened(opened, introduction)  # shared with the selections of this dataset
        self._rows: Rows | None = None  # those of the manifest that are selected; None: all
        self._session: Session | None = None
        self._closing: weakref.finalize[..., Dataset] | None = None  # of the session
        self._owner = 0
        self._lock = forks.lock()
        # The BLAKE3 of a sample is over all of its bytes: to verify it in full is to read it in full.
        self._fields = Fields.chosen(opened, fields, whole=verify == "full", copy=copy)
        self._let_views_be_sent()
        self._open(introduce=True)

    def __len__(self) -> int:
        return len(self.manifest) if self._rows is None else len(self._rows.array)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self.select(index)
        return (self._batch if self._makes_samples() else self.__getitems__)([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples at ``indices``: one plan, one request per peer, every sample checked.

        If a subclass overrides ``__getitem__`` alone, this method calls it for each sample, at one request per sample;
        a subclass that overrides this method, or a ``transform``, causes one request per peer.
        """
        alone = self._makes_samples() and type(self).__getitems__ is Dataset.__getitems__
        return [self._alone(int(index)) for index in indices] if alone else self._batch(indices)

    def __iter__(self) -> Iterator[Any]:
        """Yield all samples, in the order of the manifest.

        Without this method Python would iterate by ``__getitem__`` until any ``IndexError``, even one of a transform.
        """
        for index in range(len(self)):
            yield self._alone(index)

    def __reversed__(self) -> Iterator[Any]:
        for index in range(len(self) - 1, -1, -1):
            yield self._alone(index)

    def __repr__(self) -> str:
        size = summary(self.manifest, self.rows)
        return f"{type(self).__name__}({str(self._opened.path)!r}, {size}, cache={self._cache})"

    @property
    def manifest(self) -> Manifest:
        """The manifest: the same in every process that receives this dataset by pickle or by fork.

        Raises ``Corrupt``, naming both digests, if the file at its path has become another manifest.
        """
        return self._opened.manifest

    @property
    def rows(self) -> Ints | None:
        """The rows of the manifest that are selected ``(len(self),)``, read-only; ``None`` for all of them."""
        return None if self._rows is None else self._rows.array

    @property
    def identity(self) -> str:
        """64 hex digits that name these samples in this order: what states and ledgers are of.

        The manifest's digest, or for a selection a digest over that and the rows.
        """
        whole = str(self.manifest.digest)
        return whole if self._rows is None else identity_of_rows(whole, self._rows.array)

    @property
    def dataset_name(self) -> str:
        """What caches call this dataset in their tables and metrics: the name in its manifest, else its file's."""
        return self._opened.introduction.dataset_name

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of a sample's fields, in order."""
        return self._fields.names

    @property
    def features(self) -> dict[str, Feature]:
        """The type of each field: ``{"image": Feature("bytes"), "label": Feature("int64", classes=("cat", …))}``."""
        return features_of(self.manifest.header, self._fields.names)

    @property
    def scalars(self) -> Columns:
        """The scalar columns and the keys of these samples, for expressions and groups."""
        header, tables = self.manifest.header, self.manifest.tables
        taken = None if self._rows is None else self._rows.array

        def column(name: str) -> Any:
            whole = tables.scalars.get(name, tables.keys)
            return whole if taken is None else whole.take(taken)

        return Columns([field.name for field in header.scalars], [field.name for field in header.blobs], column)

    @property
    def transform(self) -> Callable[[Sample], Any] | None:
        return self._transform

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names behind the integer labels, in order of label; empty where there are none."""
        return next((field.classes for field in self.manifest.header.fields if field.classes), ())

    def stats(self) -> dict[str, int]:
        """Return the counters of this process (workers have their own).

        ``samples``; ``bytes_host`` and ``bytes_rack``: sample bytes delivered by that tier; ``bytes_origin``: bytes
        that this process read from the origin, to hand out or to fill a cache; ``fallbacks``: shards that were read
        elsewhere since a daemon failed; ``corruptions``: wrong bytes that were found and replaced; and more.
        """
        return self._open().stats.snapshot()

    def read_seconds(self) -> dict[str, float]:
        """Return how long the reads of this process took, summed over its threads, by tier: host, rack, origin."""
        return self._open().stats.seconds()

    def count(self, name: str, amount: int) -> None:
        """Add to one of the counters of ``stats``."""
        self._open().stats.add(name, amount)

    @property
    def can_collate(self) -> bool:
        """Whether no sample is processed alone: no transform is given, and no subclass overrides a method."""
        kind = type(self)
        own = kind.__getitem__ is Dataset.__getitem__ and kind.__getitems__ is Dataset.__getitems__
        return own and self._transform is None

    @property
    def reads_bytes(self) -> bool:
        return self._fields.span is not None

    @property
    def place(self) -> Hashable:
        """Equal for datasets of one manifest that is read through one cache."""
        return self._opened.digest, self._cache

    @staticmethod
    def join(
        *datasets: TorchDataset[Any],
        on: str = KEY_FIELD,
        how: How = "inner",
        suffixes: Sequence[str] | None = None,
        fields: Sequence[str] | None = None,
        transform: Callable[..., Any] | None = None,
    ) -> Joined:
        """Return the samples that all ``datasets`` have, each with the fields of all of them; nothing is copied.

            Dataset.join(images, captions, embeddings)[i]   # {"image": …, "label": 3, "caption": …, "embedding": …}

        ``on``: the key, or a scalar field that is there in all, with distinct values in each; samples are in the order
        of the first dataset. ``how``: with ``"inner"``, samples that are missing somewhere are left out, counted and
        named in a warning of the log; ``"strict"`` raises. ``suffixes``: one per dataset, for fields of one name.
        ``fields`` and ``transform`` are of the joined sample; each dataset's own ``transform`` is applied before.

        A batch is one request per peer and dataset. Where a loader takes resident samples first, a sample counts as
        resident by the dataset that has the most bytes; needs are reported for all. Raises ``ValueError`` for keys that
        are there twice, an unknown field, field names that collide, and if no sample is in all.
        """
        return join(datasets, on, how, suffixes, fields, transform)

    def placement(self) -> Placement:
        return Placement.of_leaf(self, self.rows)

    def follow(self) -> None:
        """Say to daemons that another process reports what this one reads, as a rank's leader does."""
        self._opened.introduce_as_follower()

    def needs(self) -> NeedsChannel | None:
        """Return a new channel that reports needs and returns what is resident; ``None`` without a cache."""
        return self._open().needs()

    def session(self) -> Session:
        """Return what this process has open for the dataset."""
        return self._open()

    def close(self) -> None:
        """Close sockets, threads and maps. They open again when the dataset is used again."""
        with self._lock:
            self._session, closing = None, self._closing
        if closing is not None:
            closing()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in ("_session", "_closing", "_lock"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_session()
        self._let_views_be_sent()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _of(self, positions: Ints) -> Self:
        rows = positions if self._rows is None else self._rows.array[positions]
        manifest = self.manifest
        made = object.__new__(type(self))  # whatever arguments a subclass's constructor has
        made.__dict__.update(self.__dict__, _rows=None if is_all(rows, len(manifest)) else Rows(rows))
        made._forget_session()
        return made

    def reading(self, fields: Sequence[str]) -> Dataset:
        """Return this dataset without its other fields, unless the user's code makes samples of them."""
        if not self.can_collate or not fields or set(fields) == set(self.fields):
            return self
        made = self._of(np.arange(len(self)))
        made._fields = Fields.chosen(self.manifest, fields, whole=self._verify == "full", copy=self._copy)
        return made

    def _forget_session(self) -> None:
        """Begin as a dataset that has used nothing: with a lock of its own."""
        self._session, self._closing, self._owner, self._lock = None, None, 0, forks.lock()

    def _rows_at(self, positions: Ints) -> Ints:
        """Return the rows of the manifest at these positions."""
        return positions if self._rows is None else self._rows.array[positions]

    def _makes_samples(self) -> bool:
        """Whether a subclass overrides ``__getitem__``, which may call this class's method."""
        return type(self).__getitem__ is not Dataset.__getitem__

    def _batch(self, indices: Sequence[int]) -> list[Any]:
        positions = self.checked(indices)
        rows = self._rows_at(positions)
        return made(LoadedRows(self, positions, rows, self.read(rows))) if len(rows) else []

    def _alone(self, index: int) -> Any:
        """Return one sample, by a subclass's ``__getitem__`` if it overrides that."""
        if not self._makes_samples():
            return self[index]
        positions = np.asarray([index], np.int64)
        return made(LoadedByMethod(self, positions, self._rows_at(positions), in_batches=False))[0]

    def _let_views_be_sent(self) -> None:
        """Have ``multiprocessing`` pickle views: a worker that cannot pickle a batch reports it on stderr only, and the
        training loop would wait for that batch forever."""
        if not self._copy:
            ForkingPickler.register(memoryview, _as_bytes)

    def _open(self, *, introduce: bool = False) -> Session:
        if self._session is None or self._owner != os.getpid():
            with self._lock:
                if self._session is None or self._owner != os.getpid():
                    watch_parent_of_worker()
                    session = self._opened.acquire(partial(self._new_session, introduce=introduce))
                    if self._closing is not None:  # in a forked child: the finalizer of its parent's session
                        self._closing.detach()
                    self._closing = weakref.finalize(self, self._opened.release, session, os.getpid())
                    self._closing.atexit = False  # process_exit closes the session
                    self._session, self._owner = session, os.getpid()
        return self._session

    def _new_session(self, *, introduce: bool) -> Session:
        said = self._opened.introduction
        return Session(self.manifest, self._cache, self._verify, introduce=introduce, introduction=said)

    def read(self, rows: npt.NDArray[np.intp]) -> Batch | None:
        """Return the verified bytes of ``rows (n,)`` of the manifest; ``None`` if no byte field is read."""
        span = self._fields.span
        return self._open().read(plan_batch(self.manifest, rows, span)) if span is not None else None

    def load(self, indices: Sequence[int], *, lose: bool = False) -> Loaded:
        """Read the bytes of the samples at ``indices``, which are made of them later.

        ``lose``: a sample that the origin lost raises when it is made; else reading raises for the whole batch.
        """
        positions = self.checked(indices)
        rows = self._rows_at(positions)
        if self._makes_samples() or type(self).__getitems__ is not Dataset.__getitems__:
            in_batches = type(self).__getitems__ is not Dataset.__getitems__
            return LoadedByMethod(self, positions, rows, in_batches)
        batch, lost = self._read_each(rows) if lose else (self.read(rows), {})
        return LoadedRows(self, positions, rows, batch, lost)

    def _read_each(self, rows: npt.NDArray[np.intp]) -> tuple[Batch | None, dict[int, Changed]]:
        """Return the bytes of the samples that the origin has, and the errors of those that it lost, by position."""
        span = self._fields.span
        if span is None:
            return None, {}
        batch, lost = self._open().read_each(
            plan_batch(self.manifest, rows, span), lambda at: plan_batch(self.manifest, rows[at : at + 1], span)
        )
        if not lost:
            return batch, lost
        there = np.delete(np.arange(len(rows)), list(lost))
        return (batch.only(there, plan_batch(self.manifest, rows[there], span)) if len(there) else None), lost

    def named(self, index: int) -> Named:
        """Return how messages name a sample."""
        if self._rows is None:
            return Named.of(self.manifest, index, index)
        row = int(self._rows.array[index]) if -len(self) <= index < len(self) else len(self.manifest)
        return Named.of(self.manifest, index, row)

    def seeds(self, seed: int, epochs: int | npt.NDArray[Any], indices: Ints) -> Seeds:
        """Return the seeds of samples in epochs ``(n,)``, the same in each selection that has the sample."""
        return seeds_of(seed, epochs, self.manifest.digest, self._rows_at(indices))

    def raw_samples(self, rows: npt.NDArray[np.intp], batch: Batch | None) -> Iterator[Sample]:
        """Yield the samples of a batch that was read, before any transform, each copied when it is yielded."""
        return self._fields.samples(self.manifest, rows, batch)

    def columns(self, indices: Sequence[int]) -> dict[str, Any]:
        """Return the samples at ``indices`` as one collated batch, by field. No transform is applied."""
        rows = self._rows_at(self.checked(indices))
        return self._fields.columns(self.manifest, rows, self.read(rows))


def _as_bytes(view: memoryview) -> tuple[type[bytes], tuple[bytes]]:
    return bytes, (view.tobytes(),)
