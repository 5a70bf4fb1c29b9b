"""``Dataset``: a map-style torch dataset whose bytes come through the cache.

It is a description (where the manifest is, where the cache is, which fields to read), so it pickles in a few bytes and
survives a fork; each process opens a session of its own on first use.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset as TorchDataset

from quiver import forks
from quiver.manifest import Manifest
from quiver.plan import plan_batch
from quiver_client.batch import Batch, Verify
from quiver_client.config import parse_cache
from quiver_client.failure import failure
from quiver_client.fields import Fields, Sample
from quiver_client.manifest_download import open_manifest
from quiver_client.needs_reporter import NeedsChannel
from quiver_client.orphans import watch_parent_of_worker
from quiver_client.session import Session


class Dataset(TorchDataset[Any]):
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
        # The digest is pickled with this description: by then the path may name another manifest.
        self._path, self._digest = opened.path, opened.digest
        self._cache = parse_cache(cache)
        self._verify: Verify = verify
        self._transform = transform
        self._copy = copy
        self._manifest: Manifest | None = opened
        self._session: Session | None = None
        self._closing: weakref.finalize[..., Dataset] | None = None  # of the session
        self._owner = 0
        self._lock = forks.lock()
        # The BLAKE3 of a sample is over all of its bytes: to verify it in full is to read it in full.
        self._fields = Fields.chosen(opened, fields, whole=verify == "full", copy=copy)
        self._let_views_be_sent()
        self._open(introduce=True)

    def __len__(self) -> int:
        return len(self.manifest)

    def __getitem__(self, index: int) -> Any:
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
        return f"Dataset({str(self._path)!r}, {len(self)} samples, cache={self._cache})"

    @property
    def manifest(self) -> Manifest:
        """The manifest: the same in every process that receives this dataset by pickle or by fork.

        Raises ``Corrupt``, naming both digests, if the file at its path has become another manifest.
        """
        if self._manifest is None:
            self._manifest = Manifest.open(self._path, self._digest)
        return self._manifest

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of a sample's fields, in order."""
        return self._fields.names

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

    def needs(self) -> NeedsChannel | None:
        """Return a new channel that reports needs and returns what is resident; ``None`` without a cache."""
        return self._open().needs()

    def close(self) -> None:
        """Close sockets, threads and maps. They open again when the dataset is used again."""
        with self._lock:
            self._session, closing = None, self._closing
        if closing is not None:
            closing()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in ("_manifest", "_session", "_closing", "_lock"):
            del state[name]
        # A spawned worker gets the manifest itself: another file may have its path by then.
        fd = self.manifest.share() if get_spawning_popen() is not None else None
        state["_passed"] = None if fd is None else DupFd(fd)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        passed = state.pop("_passed")
        self.__dict__.update(state, _manifest=None, _session=None, _closing=None, _owner=0, _lock=forks.lock())
        if passed is not None:
            self._manifest = Manifest.adopt(self._path, passed.detach(), self._digest)
        self._let_views_be_sent()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _makes_samples(self) -> bool:
        """Whether a subclass overrides ``__getitem__``, which may call this class's method."""
        return type(self).__getitem__ is not Dataset.__getitem__

    def _batch(self, indices: Sequence[int]) -> list[Any]:
        rows = self.checked(indices)
        if not len(rows):
            return []
        samples = self._fields.samples(self.manifest, rows, self.read(rows))
        if self._transform is None:
            return list(samples)
        transform, out = self._transform, []
        for row, sample in zip(rows, samples, strict=True):
            try:
                out.append(transform(sample))
            except (StopIteration, IndexError) as error:  # a loop would take them for the end of the dataset
                raise failure("transform", error, self.manifest, [int(row)]) from error
        return out

    def _alone(self, index: int) -> Any:
        """Return one sample, by a subclass's ``__getitem__`` if it overrides that."""
        try:
            return self[index]
        except StopIteration as error:
            raise failure(f"{type(self).__name__}.__getitem__", error, self.manifest, [index]) from error

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
                    session = Session(self.manifest, self._cache, self._verify, introduce=introduce)
                    if self._closing is not None:  # in a forked child: the finalizer of its parent's session
                        self._closing.detach()
                    self._closing = weakref.finalize(self, _close, session, os.getpid())
                    self._closing.atexit = False  # process_exit closes the session
                    self._session, self._owner = session, os.getpid()
        return self._session

    def checked(self, indices: Sequence[int]) -> npt.NDArray[np.intp]:
        """Return indices, negative ones too, as rows of ``len(self)`` samples. Raises ``IndexError``, ``TypeError``."""
        rows = np.asarray(indices)
        if rows.size == 0:
            return np.empty(0, np.intp)
        if rows.dtype.kind == "O" and rows.ndim == 1 and all(isinstance(row, int) for row in rows.tolist()):
            raise IndexError(f"indices out of range for {len(self)} samples")  # integers beyond 64 bits
        if rows.dtype.kind not in "iu" or rows.ndim != 1:
            raise TypeError(f"indices must be integers, not {rows.dtype}")
        count = len(self)
        if rows.dtype.kind == "u":
            rows = np.minimum(rows, np.uint64(count))  # past the end stays past the end and does not turn negative
        rows = rows.astype(np.intp)
        wrong = (rows < -count) | (rows >= count)
        if wrong.any():
            raise IndexError(f"index {int(rows[wrong][0])} is out of range for {count} samples")
        return cast("npt.NDArray[np.intp]", np.where(rows < 0, rows + count, rows))

    def read(self, rows: npt.NDArray[np.intp]) -> Batch | None:
        """Return the verified bytes of ``rows (n,)`` in ``0 .. len(self) - 1``; ``None`` if no byte field is read."""
        span = self._fields.span
        return self._open().read(plan_batch(self.manifest, rows, span)) if span is not None else None

    def columns(self, indices: Sequence[int]) -> dict[str, Any]:
        """Return the samples at ``indices`` as one collated batch, by field. No transform is applied."""
        rows = self.checked(indices)
        return self._fields.columns(self.manifest, rows, self.read(rows))


def _close(session: Session, owner: int) -> None:
    """Close a session unless it belongs to the parent of this forked process, as do its threads and sockets."""
    if owner == os.getpid():
        session.close()


def _as_bytes(view: memoryview) -> tuple[type[bytes], tuple[bytes]]:
    return bytes, (view.tobytes(),)
