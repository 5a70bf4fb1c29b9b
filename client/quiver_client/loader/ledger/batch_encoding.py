"""One drawn batch as bytes in a ledger, and back: how many entries it takes, or how many of each shard.

A batch takes the next entries of each shard (``quiver.substitution``), so one count per shard describes it, and a batch
of the plain permutation is one number. The bytes have a meaning only together with the ``Order`` before the batch was
taken. Invariant: any bytes decode to a batch that this order could have drawn, or are rejected. The ledger deflates
many batches together (``quiver_client.loader.ledger.format``), so nothing is compressed here.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from quiver.substitution import Ints, Order

VARINT_BYTES_MAX: Final = 9
SKIPPED, _BY_SHARD = 1, 2  # bits of the head


def encode_batch(order: Order, entries: Ints, batch_size: int) -> bytes:
    """Return the bytes that ``decode_batch`` turns into ``entries`` again. Call it before ``order.take(entries)``.

    ``entries``: sorted, at most ``batch_size``, and of each shard the next ones, as every batch of an ``Order`` is;
    ``ValueError`` otherwise. The batch counts as consumed; see ``skipped``.
    """
    if len(entries) > batch_size:
        raise ValueError(f"a batch of {len(entries)} samples is larger than batch_size={batch_size}")
    # Encode how many samples a full batch has more: so a full batch of the permutation, the usual case, is one byte.
    head = (batch_size - len(entries)) << 2
    if np.array_equal(order.plain(len(entries)), entries):
        return varint(head)
    shards, counts = np.unique(order.shards[entries], return_counts=True)
    if not np.array_equal(order.prefixes(shards, counts), entries):
        raise ValueError("a batch must take the next entries of each shard, in the order of the permutation")
    pairs = np.column_stack([np.diff(shards, prepend=-1) - 1, counts - 1])
    return b"".join(map(varint, [head | _BY_SHARD, *pairs.ravel().tolist()]))


def skipped(batch: bytes) -> bytes:
    """Return an encoded batch marked as drawn but never consumed, since reading it failed."""
    head, at = number_at(batch, 0)
    return varint(head | SKIPPED) + batch[at:]


def decode_batch(order: Order, batch: bytes, batch_size: int) -> tuple[Ints, bool]:
    """Return a batch's entries, sorted, and whether it was skipped. ``ValueError`` if ``order`` has no such batch."""
    head, at = number_at(batch, 0)
    count = batch_size - (head >> 2)
    if not 0 <= count <= len(order):
        raise ValueError(f"a batch of {count} samples does not fit {len(order)} pending ones")
    if head & _BY_SHARD:
        return _by_shard(order, batch, at, count), bool(head & SKIPPED)
    if at != len(batch):
        raise ValueError(f"{len(batch) - at} bytes follow a batch of the permutation")
    return order.plain(count), bool(head & SKIPPED)


def _by_shard(order: Order, batch: bytes, at: int, count: int) -> Ints:
    numbers = []
    while at < len(batch):
        number, at = number_at(batch, at)
        numbers.append(number)
    if len(numbers) % 2:
        raise ValueError("a batch that ends with a shard and without its count")
    gaps, more = np.array(numbers, np.int64).reshape(-1, 2).T
    left = order.left
    if (gaps >= len(left)).any() or (np.cumsum(gaps + 1) > len(left)).any():
        raise ValueError(f"a batch of a shard that is not one of {len(left)}")
    shards = np.cumsum(gaps + 1) - 1
    if (more >= left[shards]).any() or int((more + 1).sum()) != count:
        raise ValueError(f"a batch of {count} samples does not fit what is pending of its shards")
    return order.prefixes(shards, more + 1)


def varint(value: int) -> bytes:
    """Return a number in groups of seven bits, the lowest first; the highest bit of a byte says that more follow."""
    if not 0 <= value < 1 << 7 * VARINT_BYTES_MAX:
        raise ValueError(f"{value} is not a number between 0 and 2⁶³")
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number_at(data: bytes, at: int) -> tuple[int, int]:
    """Return the varint at ``at`` and the offset behind it. ``ValueError`` if ``data`` ends within it."""
    value = 0
    for shift, byte in enumerate(data[at : at + VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, at + shift + 1
    raise ValueError("a number that does not end")
