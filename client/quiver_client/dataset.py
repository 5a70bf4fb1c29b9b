"""``Dataset``: a map-style torch dataset whose bytes come through the cache.

It is a description (where the manifest is, where the cache is, what is wanted), so it pickles in a few bytes and
survives a fork; the session behind it opens on first use in each process.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset as TorchDataset

from quiver import forks
from quiver.manifest import KEY_FIELD, Field, Manifest
from quiver.plan import plan_batch
from quiver_client.batch import Batch, Verify
from quiver_client.config import parse_cache
from quiver_client.failure import failure
from quiver_client.manifest_download import open_manifest
from quiver_client.needs_reporter import NeedsChannel
from quiver_client.session import Session

Sample = dict[str, Any]


class Dataset(TorchDataset[Any]):
    """Samples of an indexed dataset, read through a cache.

    ``manifest`` is the path or URL of a manifest made by ``quiver index``. ``cache`` is ``http://node:7717,…`` for a
    rack, ``file:///folder?capacity=200GiB`` for a folder of this machine, by default ``$QUIVER_CACHE`` or else
    ``~/.cache/quiver``. ``fields`` chooses fields, ``"__key__"`` among them. ``transform`` is applied to each sample's
    dictionary. ``verify``: ``"fast"`` compares XXH3-64 of every field handed out, ``"full"`` BLAKE3 of every sample,
    ``"off"`` nothing (shards are verified when they are filled in any case). XXH3 finds accidents and is no defence:
    whoever is in the ring, or on the network to it, can forge a sample of equal XXH3 in milliseconds. Where not all of
    them are trusted, choose ``"full"``. ``copy=False`` hands byte fields out as
    read-only ``memoryview`` instead of ``bytes``: of a shard on this machine, its mapped file itself. A view keeps what
    it is part of in memory, and is for a ``transform`` or a collate function: sent to another process, as by a loader's
    worker, it arrives as ``bytes``. It was readable when it was checked, or with ``verify="off"`` when it was mapped;
    if somebody shortens the file of a shard afterwards, or its disk fails, touching the view ends the process by
    SIGBUS. Copied bytes are safe from that: they are read again, from elsewhere.

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
        verify: Verify = "fast",
        copy: bool = True,
    ) -> None:
        if verify not in get_args(Verify):
            raise ValueError(f"verify={verify!r}: choose fast, full or off")
        opened = open_manifest(os.fspath(manifest))
        # The digest goes wherever this description goes: the same path may name another manifest by then.
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
        self._choose(fields)
        self._let_views_be_sent()
        self._open(introduce=True)

    def __len__(self) -> int:
        return len(self.manifest)

    def __getitem__(self, index: int) -> Any:
        return (self._batch if self._makes_samples() else self.__getitems__)([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples at ``indices``: one plan, one request per peer, every sample checked.

        A subclass that overrides ``__getitem__`` alone is asked for each sample by itself, which takes a request each;
        one that overrides this method, or a ``transform``, is asked once.
        """
        alone = self._makes_samples() and type(self).__getitems__ is Dataset.__getitems__
        return [self._alone(int(index)) for index in indices] if alone else self._batch(indices)

    def __iter__(self) -> Iterator[Any]:
        """Yield all samples, in the order of the manifest.

        Without this Python would iterate by ``__getitem__`` until an ``IndexError``, whoever raised it.
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
        """The manifest: the same in every process that this dataset was pickled to, or forked into.

        Raises ``Corrupt`` if the file at its path is another one by now, of which the digests are named.
        """
        if self._manifest is None:
            self._manifest = Manifest.open(self._path, self._digest)
        return self._manifest

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields that a sample has, in their order."""
        return self._wanted

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
        that this process read from the origin, whether to hand out or to fill a cache; ``fallbacks``: shards for which
        a daemon was passed over; ``corruptions``: wrong bytes that were found and replaced; and more.
        """
        return self._open().stats.snapshot()

    def count(self, name: str, amount: int) -> None:
        """Add to one of the counters of ``stats``."""
        self._open().stats.add(name, amount)

    def needs(self) -> NeedsChannel | None:
        """Return the way to say what is still to be read, and to hear what is resident; ``None`` without a cache."""
        return self._open().needs()

    def close(self) -> None:
        """Let go of sockets, threads and maps. Using the dataset again opens them again."""
        with self._lock:
            self._session, closing = None, self._closing
        if closing is not None:
            closing()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in ("_manifest", "_session", "_closing", "_lock"):
            del state[name]
        # A worker that is being spawned gets the manifest itself, whatever is under its path by now.
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
        """Whether this is of a subclass with a ``__getitem__`` of its own, which may call ours."""
        return type(self).__getitem__ is not Dataset.__getitem__

    def _batch(self, indices: Sequence[int]) -> list[Any]:
        rows = self.checked(indices)
        if not len(rows):
            return []
        samples = self._samples(rows, self.read(rows))
        if self._transform is None:
            return list(samples)
        transform, out = self._transform, []
        for row, sample in zip(rows, samples, strict=True):
            try:
                out.append(transform(sample))
            except (StopIteration, IndexError) as error:  # from here on these would say that there are no more samples
                raise failure("transform", error, self.manifest, [int(row)]) from error
        return out

    def _alone(self, index: int) -> Any:
        """Return a sample that may be made by a subclass."""
        try:
            return self[index]
        except StopIteration as error:
            raise failure(f"{type(self).__name__}.__getitem__", error, self.manifest, [index]) from error

    def _choose(self, fields: Sequence[str] | None) -> None:
        header = self.manifest.header
        known = [field.name for field in header.fields]
        wanted = known if fields is None else list(fields)
        if not wanted or isinstance(fields, str):
            raise ValueError(f"fields={fields!r}: give a list of names out of {', '.join(known)}, {KEY_FIELD}")
        unknown = [name for name in wanted if name not in known and name != KEY_FIELD]
        if unknown:
            raise ValueError(
                f"fields: no field {unknown[0]!r} in {self._path}; there are {', '.join(known)}, {KEY_FIELD}"
            )
        self._wanted = tuple(wanted)
        blobs = [field.name for field in header.blobs]
        chosen = [blobs.index(name) for name in wanted if name in blobs]
        # A sample's BLAKE3 is over all of its bytes: verified in full, it is read in full.
        whole = (0, len(blobs) - 1)
        self._span = None if not chosen else whole if self._verify == "full" else (min(chosen), max(chosen))
        # Each byte field wanted: what it is, and its place among the fields that are read.
        self.blobs = {blobs[at]: (header.blobs[at], at - self._span[0]) for at in chosen} if self._span else {}

    def _let_views_be_sent(self) -> None:
        """Have ``multiprocessing`` pickle views: a worker that cannot pickle a batch says so on stderr only, and the
        training loop would wait for that batch for ever."""
        if not self._copy:
            ForkingPickler.register(memoryview, _as_bytes)

    def _open(self, *, introduce: bool = False) -> Session:
        if self._session is None or self._owner != os.getpid():
            with self._lock:
                if self._session is None or self._owner != os.getpid():
                    session = Session(self.manifest, self._cache, self._verify, introduce=introduce)
                    if self._closing is not None:  # of the parent's, in a child that was forked
                        self._closing.detach()
                    self._closing = weakref.finalize(self, _close, session, os.getpid())
                    self._closing.atexit = False  # the session sees to that
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
            rows = np.minimum(rows, np.uint64(count))  # past the end stays past the end, and does not turn negative
        rows = rows.astype(np.intp)
        wrong = (rows < -count) | (rows >= count)
        if wrong.any():
            raise IndexError(f"index {int(rows[wrong][0])} is out of range for {count} samples")
        return cast("npt.NDArray[np.intp]", np.where(rows < 0, rows + count, rows))

    def read(self, rows: npt.NDArray[np.intp]) -> Batch | None:
        """Return the checked bytes of samples ``(n,)`` in ``0 .. len(self) - 1``; ``None`` if no byte field is wanted.

        What ``dataset[i]`` is made of, for those who make a batch of it in another way.
        """
        return self._open().read(plan_batch(self.manifest, rows, self._span)) if self._span is not None else None

    def _samples(self, rows: npt.NDArray[np.intp], batch: Batch | None) -> Iterator[Sample]:
        """Yield the samples one by one: their bytes are copied when their turn comes, so that what a transform lets
        go of is the memory of the next."""
        columns = (self.column(name, rows, batch) for name in self._wanted)
        for values in zip(*columns, strict=True):
            yield dict(zip(self._wanted, values, strict=True))

    def column(self, name: str, rows: npt.NDArray[np.intp], batch: Batch | None) -> Iterable[Any]:
        """Return one field of the samples, value by value."""
        if name == KEY_FIELD:
            return self.manifest.keys(rows)
        if batch is None or name not in self.blobs:
            return self.manifest.scalars(name, rows)
        field, at = self.blobs[name]
        if field.dtype and not field.skip:
            return (None if data is None else _array(data, field) for data in batch.copies(at))
        return batch.copies(at) if self._copy else batch.views(at)


def _close(session: Session, owner: int) -> None:
    """Close a session, unless it is the parent's of this process: its threads and sockets are not ours."""
    if owner == os.getpid():
        session.close()


def _as_bytes(view: memoryview) -> tuple[type[bytes], tuple[bytes]]:
    return bytes, (view.tobytes(),)


def as_values(data: npt.NDArray[np.uint8], field: Field) -> npt.NDArray[Any]:
    """Return bytes as the values that they are, the last dimension being that of a sample's; copied only if they must.

    A bool is any byte but 0, in numpy as in a file that somebody else wrote; torch wants it to be 1.
    """
    return data != 0 if field.dtype == "|b1" else data.view(field.dtype)


def _array(data: bytes, field: Field) -> npt.NDArray[Any]:
    """Return the values of an array field, as an array of its own that may be written to."""
    return as_values(np.frombuffer(bytearray(data), np.uint8), field).reshape(field.shape or -1)
