"""The order of a run, written down as it is taken, or read back: what ``ledger=`` and ``replay=`` do to a sampler."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import numpy as np

from quiver.digest import Digest
from quiver.substitution import Ints, Mask, Order
from quiver_client.loader.batch_encoding import decode_batch, encode_batch
from quiver_client.loader.epoch import Deal, Epoch, Layout
from quiver_client.loader.ledger import LedgerReader, LedgerWriter, Run, check_run

log = logging.getLogger("quiver_client")

TAKEN: Final = b"\x00"  # the first byte of a record
SKIPPED: Final = b"\x01"  # drawn, and could not be read: its samples were left out


class History:
    """Either, both or none of a ledger that is written and one that is read."""

    def __init__(self, dataset: Digest, deal: Deal, ledger: str | None, replay: str | None) -> None:
        """Raises ``ValueError`` naming ``replay`` if that is no ledger of such a run."""
        self._deal = deal
        self._run = Run(
            dataset=dataset,
            seed=deal.seed,
            shuffle=deal.shuffle,
            rank=deal.rank,
            world_size=deal.world_size,
            batch_size=deal.batch_size,
            drop_last=deal.drop_last,
        )
        self._path = self._file("ledger", ledger)
        if self._path is not None:
            check_run(self._path, self._run)
        self._writer: LedgerWriter | None = None
        self._written = False  # by this process: it goes on with its own
        self._records: dict[int, bytes] = {}
        path = self._file("replay", replay)
        if path is not None and path == self._path:
            raise ValueError("replay: it is the ledger that is written; give ledger another name")
        if path is not None and not path.is_file():
            raise ValueError(f"replay={str(path)!r}: no such file")
        self._reader = LedgerReader(path, self._run) if path is not None else None

    @property
    def replaying(self) -> bool:
        return self._reader is not None

    @property
    def writing(self) -> bool:
        return self._writer is not None

    def order(self, epoch: int, layout: Layout) -> Ints:
        """Return the samples of an epoch in the order in which the ledger has them.

        Raises ``ValueError`` if the ledger has nothing of the epoch, or not such batches.
        """
        assert self._reader is not None
        taken: list[Ints] = []
        for done, records in self._reader.records(epoch):
            before = np.zeros(self._deal.samples, bool) if done is None else done
            if done is not None:  # dealt anew from a checkpoint: what was taken after it did not count
                taken = [rows for rows in taken if done[rows].all()]
            share, _ = self._deal.share(self._deal.order(epoch, before))
            order = Order(layout.shard_of[share], len(layout.counts))
            for record in records:
                entries = decode_batch(order, record[1:])
                if len(entries) > self._deal.batch_size:
                    raise ValueError(
                        f"replay: a batch of {len(entries)} samples where there can be {self._deal.batch_size}"
                    )
                order.take(entries)
                if record[:1] == TAKEN:
                    taken.append(share[entries])
        if not taken:
            raise ValueError(f"replay: the ledger has nothing of epoch {epoch}")
        return np.concatenate(taken)

    def begin(self, epoch: Epoch, done: Mask, *, resumed: bool) -> None:
        """A pass begins, of what was not ``done`` before its shares were dealt."""
        if self._path is None:
            return
        if self._writer is None:
            try:
                self._writer = LedgerWriter(self._path, self._run, resume=resumed or self._written)
            except OSError as error:
                raise ValueError(f"ledger={str(self._path)!r} cannot be written: {error.strerror}") from error
        self._written = True
        self._records.clear()
        try:
            self._writer.begin(epoch.number, done if done.any() else None, epoch.batches)
        except OSError as error:
            self._give_up(error)

    def drawn(self, epoch: Epoch, number: int, entries: Ints) -> None:
        """A batch is about to be drawn."""
        if self._writer is not None:
            self._records[number] = encode_batch(epoch.order, entries)

    def consumed(self, number: int) -> None:
        """A batch is about to be consumed. Those before it that were not have raised, and the loop went on."""
        for earlier in [each for each in self._records if each < number]:
            self._write(SKIPPED + self._records.pop(earlier))
        if number in self._records:
            self._write(TAKEN + self._records.pop(number))

    def flush(self) -> None:
        """Bring what was consumed to the file: a checkpoint must not be ahead of it."""
        if self._writer is not None:
            try:
                self._writer.flush()
            except OSError as error:
                self._give_up(error)

    def _write(self, record: bytes) -> None:
        if self._writer is not None:
            try:
                self._writer.batch(record)
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """A disk that refuses the ledger is no reason to end the training, nor to refuse a checkpoint."""
        log.warning("ledger=%r: %s; the order is not recorded from here on", str(self._path), error.strerror or error)
        if self._writer is not None:
            self._writer.give_up()
        self._path = self._writer = None
        self._records.clear()

    def close(self) -> None:
        if self._writer is not None:
            try:
                self._writer.close()
                self._writer = None
            except OSError as error:
                self._give_up(error)

    def _file(self, name: str, path: str | None) -> Path | None:
        if path is None:
            return None
        if not isinstance(path, str | Path) or not str(path):
            raise ValueError(f"{name}={path!r}: give a file's path")
        return Path(path if self._deal.world_size == 1 else f"{path}.{self._deal.rank}")
