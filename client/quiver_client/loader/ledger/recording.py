"""What ``ledger=`` and ``replay=`` do for a sampler: ``Recorder`` writes the order, ``Replay`` reads it back."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from quiver.substitution import Ints, Mask, Order
from quiver_client.loader.epoch import Deal, Epoch, Replayed, ShardLayout
from quiver_client.loader.ledger.amendments import Amendment, decode_and_take, encode_amended
from quiver_client.loader.ledger.batch_encoding import encode_batch, skipped
from quiver_client.loader.ledger.files import LedgerReader, LedgerWriter, check_run
from quiver_client.loader.ledger.format import Run

log = logging.getLogger("quiver_client")


def open_recording(dataset: str, deal: Deal, ledger: str | None, replay: str | None) -> tuple[Recorder, Replay | None]:
    """Return the recorder, which does nothing without a ``ledger``, and the replay if there is one.

    Raises ``ValueError`` naming ``ledger`` or ``replay`` for a file that is not a ledger of this run.
    """
    run = Run(
        dataset=dataset,
        seed=deal.seed,
        shuffle=deal.shuffle,
        rank=deal.rank,
        world_size=deal.world_size,
        batch_size=deal.batch_size,
        drop_last=deal.drop_last,
        block_shards=deal.block_shards,
    )
    written = _path_of("ledger", ledger, run)
    if written is not None:
        check_run(written, run)
    path = _path_of("replay", replay, run)
    if path is None:
        return Recorder(written, run), None
    if path == written:
        raise ValueError("replay: it is the ledger that is written; give ledger another name")
    if not path.is_file():
        raise ValueError(f"replay={str(path)!r}: no such file")
    return Recorder(written, run), Replay(path, run)


class Recorder:
    """Writes consumed batches to a ledger, in the process that began it. A failing disk ends the recording only."""

    def __init__(self, path: Path | None, run: Run) -> None:
        self._path = path
        self._run = run
        self._writer: LedgerWriter | None = None
        self._pid = os.getpid()
        self._has_written = False  # then this process appends to the ledger
        # By pass: encoded batches by number, until they are consumed; and how many batches its deal has in the ledger.
        self._drawn: dict[Epoch, dict[int, bytes]] = {}
        self._written: dict[Epoch, int] = {}
        self._plain: dict[tuple[Epoch, int], bytes] = {}  # those that were amended, as they were drawn

    @property
    def is_recording(self) -> bool:
        return self._writer is not None

    def begin(self, epoch: Epoch, done: Mask, *, resumed: bool) -> None:
        """Begin a pass over the samples that were not ``done`` before its shares were dealt.

        ``resumed``: the run continues another one, and appends to its ledger. A pass that was put aside for another
        one begins again where it was.
        """
        if self._has_forked():
            log.warning("ledger=%r: the process that began it writes it, not this forked child", str(self._path))
            self._stop()
        if self._path is None:
            return
        if self._writer is None:
            try:
                self._writer = LedgerWriter(self._path, self._run, resume=resumed or self._has_written)
            except OSError as error:
                raise ValueError(f"ledger={str(self._path)!r} cannot be written: {error.strerror}") from error
            self._has_written, self._pid = True, os.getpid()
        self._drawn.setdefault(epoch, {})
        start = self._written.setdefault(epoch, epoch.batches)
        self._attempt(lambda writer: writer.begin(epoch.number, done if done.any() else None, start))

    def forget(self, epoch: Epoch) -> None:
        """Forget a pass that no loop reads any more."""
        self._drawn.pop(epoch, None)
        self._written.pop(epoch, None)
        for number in [number for of, number in self._plain if of is epoch]:
            del self._plain[epoch, number]

    def drawn(self, epoch: Epoch, number: int, entries: Ints) -> None:
        """Remember a batch that is about to be drawn."""
        if self._writer is not None:
            encoded = encode_batch(epoch.order, entries, self._run.batch_size)
            self._drawn.setdefault(epoch, {})[number] = encoded

    def amended(self, epoch: Epoch, number: int, amendment: Amendment) -> None:
        """Remember what was changed in a drawn batch because of bad samples, all of it: a later call replaces this."""
        drawn = self._drawn.get(epoch, {})
        if number in drawn:
            plain = self._plain.setdefault((epoch, number), drawn[number])
            drawn[number] = encode_amended(plain, amendment, self._run.batch_size)

    def consumed(self, epoch: Epoch, number: int) -> None:
        """Record a consumed batch. Earlier batches that were not consumed raised, and the loop continued."""
        drawn = self._drawn.get(epoch, {})
        for earlier in [each for each in drawn if each < number]:
            self._write(epoch, skipped(drawn.pop(earlier)))
        if number in drawn:
            self._write(epoch, drawn.pop(number))
        self._plain.pop((epoch, number), None)

    def flush(self) -> None:
        """Hand the consumed batches to the operating system: a checkpoint must not be ahead of the ledger."""
        self._attempt(LedgerWriter.flush)

    def close(self) -> None:
        """Mark the ledger as complete. The next pass appends to it."""
        self._attempt(LedgerWriter.close)
        if not self._has_forked():
            self._writer = None

    def _write(self, epoch: Epoch, batch: bytes) -> None:
        self._written[epoch] = self._written.get(epoch, 0) + 1
        self._attempt(lambda writer: writer.batch(batch))

    def _attempt(self, write: Callable[[LedgerWriter], None]) -> None:
        if self._writer is None or self._has_forked():
            return
        try:
            write(self._writer)
        except OSError as error:
            why = error.strerror or error
            log.warning("ledger=%r: %s; the order is not recorded from here on", str(self._path), why)
            self._stop()

    def _has_forked(self) -> bool:
        """Whether this is a forked child of the ledger's process, with a copy of what the parent has yet to write."""
        return self._has_written and self._pid != os.getpid()

    def _stop(self) -> None:
        if self._writer is not None:
            self._writer.abandon()
        self._path = self._writer = None
        self._drawn.clear()
        self._written.clear()
        self._plain.clear()


class Replay:
    """The order that a ledger recorded, to be repeated independent of what is resident."""

    def __init__(self, path: Path, run: Run) -> None:
        self._reader = LedgerReader(path, run)

    def order(self, epoch: int, deal: Deal, layout: ShardLayout) -> Replayed:
        """Return the samples of an epoch in the order in which they were consumed.

        Raises ``ValueError`` if the ledger has no batch of the epoch, or one that its order cannot have drawn.
        """
        consumed: list[tuple[Ints, Ints]] = []
        lost: list[Ints] = []
        for done, batches in self._reader.batches(epoch):
            before = np.zeros(deal.samples, bool) if done is None else done
            if done is not None:  # dealt again from a checkpoint: batches consumed after that do not count
                consumed = [each for each in consumed if done[each[0]].all()]
            share, _ = deal.share(deal.order(epoch, before, layout.shard_of))
            order = Order(layout.shard_of[share], len(layout.counts))
            for batch in batches:
                decoded = decode_and_take(order, batch, deal.batch_size)
                if not decoded.was_skipped:
                    consumed.append((share[decoded.entries], decoded.repeated))
                    lost.append(share[decoded.failed])
        if not consumed:
            raise ValueError(f"replay: the ledger has nothing of epoch {epoch}")
        rows = np.concatenate([each for each, _ in consumed])
        bad = np.concatenate(lost)
        if not len(bad) and not any(len(repeated) for _, repeated in consumed):
            return Replayed(rows)
        return Replayed(rows, [len(each) for each, _ in consumed], tuple(repeated for _, repeated in consumed), bad)


def _path_of(name: str, path: str | None, run: Run) -> Path | None:
    """Return the file of this rank."""
    if path is None:
        return None
    if not isinstance(path, str | Path) or not str(path):
        raise ValueError(f"{name}={path!r}: give a file's path")
    return Path(path if run.world_size == 1 else f"{path}.{run.rank}")
