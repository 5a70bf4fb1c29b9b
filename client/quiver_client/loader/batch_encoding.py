"""A batch as a record: what it takes of an ``Order``, in a few bytes, and back.

A record means something only together with the order before the batch was taken. Any bytes are either a batch that this
order could have had or refused: of each shard the next entries, and none that is not pending. How many entries a batch
should have the order does not know; whoever reads a record compares.
"""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np

from quiver.substitution import Ints, Order

_PLAIN, _COUNTS, _BITMAP, _DEFLATED = range(4)
VARINT_BYTES_MAX: Final = 9
# A bitmap wins over the counts where it has fewer than 8 bits for each of their bytes, deflated perhaps up to 8 times
# as many. Past that it is not tried: to look through all that is pending would cost more than the batch.
_BITMAP_BITS_PER_COUNT_BYTE: Final = 64


def encode_batch(order: Order, entries: Ints) -> bytes:
    """Return what ``decode_batch`` makes ``entries`` of again. Comes before ``order.take(entries)``.

    ``entries``: sorted, and of each shard the next ones, as every batch of an ``Order`` is; ``ValueError`` otherwise.
    """
    if np.array_equal(order.plain(len(entries)), entries):
        return varint(len(entries) << 2 | _PLAIN)
    shards, counts = np.unique(order.shards[entries], return_counts=True)
    if not np.array_equal(order.prefixes(shards, counts), entries):
        raise ValueError("a batch takes of each shard the next entries, in the order of the permutation")
    parts = [varint(_COUNTS)]
    previous = -1
    for shard, count in zip(shards.tolist(), counts.tolist(), strict=True):
        parts.append(varint((shard - previous - 1) << 1 | (count > 1)))
        if count > 1:
            parts.append(varint(count - 2))
        previous = shard
    record = b"".join(parts)
    window = order.plain(len(record) * _BITMAP_BITS_PER_COUNT_BYTE)
    if window[-1] < entries[-1]:
        return record
    window = window[: int(np.searchsorted(window, entries[-1])) + 1]
    bitmap = np.packbits(np.isin(window, entries, assume_unique=True)).tobytes()
    candidates = record, varint(_BITMAP) + bitmap, varint(_DEFLATED) + zlib.compress(bitmap, 9)
    return min(candidates, key=len)


def decode_batch(order: Order, record: bytes) -> Ints:
    """Return the entries of a batch, sorted. ``ValueError`` for a record that does not fit what is pending."""
    number, at = number_at(record, 0)
    kind = number & 3
    if kind == _PLAIN:
        if at != len(record) or number >> 2 > len(order):
            raise ValueError(f"a batch of {number >> 2} samples does not fit {len(order)} that are pending")
        return order.plain(number >> 2)
    if number >> 2:
        raise ValueError("not a record of a batch")
    if kind == _COUNTS:
        shards, counts = _counts(record, at, order.left)
        return order.prefixes(shards, counts)
    bitmap = record[at:] if kind == _BITMAP else inflate(record[at:], -(-len(order) // 8))
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8, count=min(len(bitmap), -(-len(order) // 8)))).astype(bool)
    if len(bitmap) * 8 > len(bits) or bits[len(order) :].any():
        raise ValueError(f"a bitmap of {len(bitmap)} bytes does not fit {len(order)} entries that are pending")
    window = order.plain(len(bits))
    entries: Ints = window[bits[: len(window)]]
    shards, counts = np.unique(order.shards[entries], return_counts=True)
    if not np.array_equal(order.prefixes(shards, counts), entries):
        raise ValueError("a batch that leaves out entries of a shard between others does not fit")
    return entries


def _counts(record: bytes, at: int, left: Ints) -> tuple[Ints, Ints]:
    """Return the shards and how many of each, checked against what is ``left`` of them ``(shards,)``."""
    shards, counts = [], []
    shard = -1
    while at < len(record):
        number, at = number_at(record, at)
        shard += (number >> 1) + 1
        count = 1
        if number & 1:
            more, at = number_at(record, at)
            count = more + 2
        if shard >= len(left) or count > int(left[shard]):
            raise ValueError(f"{count} entries of shard {shard} do not fit what is pending")
        shards.append(shard)
        counts.append(count)
    return np.asarray(shards, np.int64), np.asarray(counts, np.int64)


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
    """Return the varint at ``at`` and where the next thing begins."""
    value = 0
    for shift, byte in enumerate(data[at : at + VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, at + shift + 1
    raise ValueError("a number that does not end")


def inflate(data: bytes, size_max: int) -> bytes:
    """Return what ``data`` deflates, at most ``size_max`` bytes of it."""
    inflater = zlib.decompressobj()
    try:
        out = inflater.decompress(data, size_max + 1)
    except zlib.error as error:
        raise ValueError(f"a bitmap that cannot be inflated: {error}") from error
    if len(out) > size_max or not inflater.eof or inflater.unused_data:
        raise ValueError("a bitmap that ends too early or too late")
    return out
