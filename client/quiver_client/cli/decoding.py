"""What ``quiver verify --decode`` does: apply a function to every sample, in processes, and name those that it fails.

A function that ends its process, as a decoder in C may do, fails the sample that it was given: chunks that were under
way when a process died are decoded again, in a process that says which sample it is at.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import numpy as np
import numpy.typing as npt

from quiver.digest import Digest
from quiver.manifest import KEY_FIELD, Manifest
from quiver.plan import plan_batch
from quiver_client.batch import Batch
from quiver_client.config import CacheConfig
from quiver_client.fields import Fields
from quiver_client.seeding import asked_for, generators, seed_globals, seeds_of
from quiver_client.session import Session

CHUNK_BYTES: Final = 16 << 20
CHUNK_SAMPLES: Final = 1024
NO_ROW: Final = -1
AHEAD: Final = 2  # chunks per process that are submitted, so that none is idle

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, order=True)
class Undecodable:
    """A sample that the function raised for."""

    index: int
    key: str
    error: str


class Decoding(NamedTuple):
    """What to decode; sent to each process."""

    path: Path
    digest: Digest
    cache: CacheConfig | None
    function: str  # module:function


class DecodeFunction(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic from click 8.2 on
    """``module:function``, imported from the current directory, too."""

    name = "module:function"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            _imported(value)
        except (ImportError, AttributeError, ValueError) as error:
            self.fail(f"{value!r}: {error}", param, ctx)
        return str(value)


def undecodable(
    decoding: Decoding, manifest: Manifest, workers: int, on_done: Callable[[Rows], None]
) -> list[Undecodable]:
    """Apply the function to every sample; return those that it fails, in order. ``on_done`` gets what is done."""
    chunks = _chunks(manifest)
    found: list[Undecodable] = []
    suspects: list[Rows] = []  # of processes that died
    while True:
        under_way: dict[Future[list[Undecodable]], Rows] = {}
        with _pool(decoding, workers) as pool:
            is_broken = _run(pool, chunks, under_way, workers, found, on_done)
        if not is_broken:
            break
        suspects += under_way.values()
    for rows in suspects:
        found += _one_process(decoding, manifest, rows)
        on_done(rows)
    return sorted(found)


def _run(
    pool: ProcessPoolExecutor,
    chunks: Iterator[Rows],
    under_way: dict[Future[list[Undecodable]], Rows],
    workers: int,
    found: list[Undecodable],
    on_done: Callable[[Rows], None],
) -> bool:
    """Decode chunks until there are no more, or a process died: then return true, and what was under way is left."""
    while True:
        try:
            while len(under_way) < workers * AHEAD and (rows := next(chunks, None)) is not None:
                under_way[pool.submit(_decode, rows)] = rows
        except BrokenProcessPool:
            under_way[Future()] = rows  # type: ignore[assignment]  # it was taken and not submitted
            return True
        if not under_way:
            return False
        for done in wait(under_way, return_when=FIRST_COMPLETED).done:
            try:
                found += done.result()
            except BrokenProcessPool:
                return True
            on_done(under_way.pop(done))


def _one_process(decoding: Decoding, manifest: Manifest, rows: Rows) -> list[Undecodable]:
    """Decode samples of which some end the process, in one that says which sample it is at."""
    ended: list[Undecodable] = []
    while len(rows):
        at = multiprocessing.get_context("spawn").Value("q", NO_ROW, lock=False)
        try:
            with _pool(decoding, 1, at) as pool:
                return [*ended, *pool.submit(_decode, rows).result()]
        except BrokenProcessPool:
            if at.value == NO_ROW:
                raise
            ended.append(Undecodable(at.value, manifest.key(at.value), "the function ended its process"))
            rows = rows[rows != at.value]
    return ended


def _chunks(manifest: Manifest) -> Iterator[Rows]:
    """Yield all samples in the order in which they are stored, some megabytes at a time."""
    blob_of = manifest.tables.blob_of.astype(np.int64)
    rows = np.argsort(blob_of, kind="stable")
    ends = np.cumsum(manifest.blob_sizes(blob_of[rows]), dtype=np.int64)
    begin = 0
    while begin < len(rows):
        limit = CHUNK_BYTES + (int(ends[begin - 1]) if begin else 0)
        end = min(max(int(np.searchsorted(ends, limit, "right")), begin + 1), begin + CHUNK_SAMPLES)
        yield rows[begin:end]
        begin = end


def _pool(decoding: Decoding, workers: int, at: Any = None) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")  # nothing of this process, its threads least of all, is copied
    return ProcessPoolExecutor(workers, context, _open, (decoding, os.getcwd(), at))  # noqa: PTH109 - for sys.path


def _imported(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError("give module:function")
    if "" not in sys.path and os.getcwd() not in sys.path:  # noqa: PTH109
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as `python -m` does
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise ValueError("it cannot be called")
    return found  # type: ignore[no-any-return]


# -- in a process of the pool ------------------------------------------------------------------------------------------

_opened: _Opened | None = None


class _Opened(NamedTuple):
    manifest: Manifest
    session: Session
    fields: Fields
    decode: Callable[..., Any]
    generators: tuple[str, ...]
    at: Any


def _open(decoding: Decoding, folder: str, at: Any) -> None:
    """``at``: shared memory for the number of the sample that is being decoded."""
    global _opened  # noqa: PLW0603 - one per process
    os.chdir(folder)
    manifest = Manifest.open(decoding.path, decoding.digest)
    session = Session(manifest, decoding.cache, "full", introduce=False)
    decode = _imported(decoding.function)
    fields = Fields.chosen(manifest, [*_names(manifest), KEY_FIELD], whole=True, copy=True)
    _opened = _Opened(manifest, session, fields, decode, asked_for(decode), at)


def _decode(rows: Rows) -> list[Undecodable]:
    """Make samples, each seeded as in a loader's first epoch."""
    assert _opened is not None
    manifest, _, fields, decode, names, at_row = _opened
    batch, lost = _read(_opened, rows)
    samples = fields.samples(manifest, np.delete(rows, list(lost)), batch)
    found = [_failed(manifest, int(rows[at]), error) for at, error in lost.items()]
    there = [at for at in range(len(rows)) if at not in lost]
    seeds = seeds_of(0, 0, manifest.digest, rows)
    for at in there:
        sample, seed = next(samples), int(seeds[at])
        seed_globals(seed)
        if at_row is not None:
            at_row.value = int(rows[at])
        try:
            decode(sample, **generators(names, seed))
        except Exception as error:  # noqa: BLE001 - this is what is reported
            found.append(_failed(manifest, int(rows[at]), error))
    return found


def _read(opened: _Opened, rows: Rows) -> tuple[Batch | None, Mapping[int, Exception]]:
    manifest, session, fields, *_ = opened
    span = fields.span
    if span is None:
        return None, {}
    batch, lost = session.read_each(
        plan_batch(manifest, rows, span), lambda at: plan_batch(manifest, rows[at : at + 1], span)
    )
    there = np.delete(np.arange(len(rows)), list(lost))
    if not lost or not len(there):
        return (None if lost else batch), lost
    return batch.only(there, plan_batch(manifest, rows[there], span)), lost


def _names(manifest: Manifest) -> list[str]:
    return [field.name for field in manifest.header.fields]


def _failed(manifest: Manifest, row: int, error: Exception) -> Undecodable:
    return Undecodable(row, manifest.key(row), f"{type(error).__name__}: {error}")
