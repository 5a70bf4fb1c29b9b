"""What was changed in a drawn batch since some of its samples were bad, as bytes in a ledger, and back.

A batch's *candidates* are the samples that were drawn, and then those that were added: pending ones in place of bad
ones, or samples that are repeated where nothing is pending. Some candidates failed; the others were handed out, in
this order. A head that no plain batch has (``batch_encoding``) marks an amended one, and the batch as drawn follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quiver.substitution import Ints, Order
from quiver_client.loader.ledger.batch_encoding import SKIPPED, decode_batch, number_at, varint


@dataclass(frozen=True, slots=True)
class Amendment:
    """``added``: for each added candidate ``(True, row)`` if the sample is repeated, or ``(False, shard)`` if it was
    the last pending one of its shard. ``failed``: places among all candidates, ascending."""

    added: tuple[tuple[bool, int], ...] = ()
    failed: tuple[int, ...] = ()

    def and_then(self, added: tuple[tuple[bool, int], ...], failed: tuple[int, ...]) -> Amendment:
        return Amendment(self.added + added, tuple(sorted({*self.failed, *failed})))


class Decoded(NamedTuple):
    """A batch of a ledger."""

    entries: Ints  # that were handed out, in order, but for repeated samples
    repeated: Ints  # rows that were handed out after them
    failed: Ints  # entries
    was_skipped: bool


def encode_amended(batch: bytes, amendment: Amendment, batch_size: int) -> bytes:
    """Return the bytes of a batch, as ``encode_batch`` returned it, with what was changed in it."""
    numbers = [(batch_size + 1) << 2, len(amendment.added)]
    numbers += [value << 1 | is_repeated for is_repeated, value in amendment.added]
    numbers += [len(amendment.failed), *np.diff(amendment.failed, prepend=0).tolist()]
    return b"".join(map(varint, numbers)) + batch


def is_amended(batch: bytes, batch_size: int) -> bool:
    return number_at(batch, 0)[0] >> 2 == batch_size + 1


def decode_and_take(order: Order, batch: bytes, batch_size: int) -> Decoded:
    """Take a recorded batch from ``order``, and return it. ``ValueError`` if the order cannot have drawn it."""
    if not is_amended(batch, batch_size):
        entries, was_skipped = decode_batch(order, batch, batch_size)
        order.take(entries)
        return Decoded(entries, entries[:0], entries[:0], was_skipped)
    amendment, at = _amendment_at(batch)
    drawn, _ = decode_batch(order, batch[at:], batch_size)
    order.take(drawn)
    taken = [-1 if is_repeated else order.take_last(value)[0] for is_repeated, value in amendment.added]
    candidates = np.concatenate([drawn, np.array(taken, np.int64)])
    added = [value if is_repeated else -1 for is_repeated, value in amendment.added]
    repeated = np.concatenate([np.full(len(drawn), -1, np.int64), np.array(added, np.int64)])
    failed = np.zeros(len(candidates), bool)
    if amendment.failed and amendment.failed[-1] >= len(candidates):
        raise ValueError(f"a batch of {len(candidates)} candidates of which number {amendment.failed[-1]} failed")
    failed[list(amendment.failed)] = True
    is_entry = candidates >= 0
    return Decoded(
        candidates[is_entry & ~failed],
        repeated[~is_entry & ~failed],
        candidates[is_entry & failed],
        bool(number_at(batch, 0)[0] & SKIPPED),
    )


def _amendment_at(batch: bytes) -> tuple[Amendment, int]:
    _, at = number_at(batch, 0)
    count, at = number_at(batch, at)
    added = []
    for _ in range(min(count, len(batch))):
        value, at = number_at(batch, at)
        added.append((bool(value & 1), value >> 1))
    count, at = number_at(batch, at)
    failed, place = [], 0
    for _ in range(min(count, len(batch))):
        step, at = number_at(batch, at)
        place += step
        failed.append(place)
    return Amendment(tuple(added), tuple(failed)), at
