"""The shard: an immutable run of samples that verifies itself.

    sample bytes, back to back | for each sample: BLAKE3 (32 bytes), length (u64) | count (u64)      all little-endian

The name of a shard is BLAKE3 over ``quiver-shard-v1`` and everything from the table on: a hash tree of two levels. So a
shard is verified without a manifest, and a single corrupt sample can be found and mended by itself.

Invariant: bytes become a ``Shard`` through ``verified`` only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import blake3
import numpy as np
import numpy.typing as npt

from quiver.digest import DIGEST_BYTES, Bytes, Digest
from quiver.errors import Corrupt

DOMAIN: Final = b"quiver-shard-v1"
ROW: Final = np.dtype([("digest", f"V{DIGEST_BYTES}"), ("length", "<u8")])
COUNT_BYTES: Final = 8
ROW_BYTES: Final = ROW.itemsize

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]


def encode_table(digests: U8, lengths: U64) -> bytes:
    """Return the table of a shard: digests ``(n, 32)`` uint8, lengths ``(n,)`` in bytes."""
    rows = np.empty(len(lengths), ROW)
    rows["digest"] = np.ascontiguousarray(digests).view(f"V{DIGEST_BYTES}").reshape(-1)
    rows["length"] = lengths
    return rows.tobytes() + len(lengths).to_bytes(COUNT_BYTES, "little")


def name_of(table: Bytes) -> Digest:
    """Return the name of the shard that has this table."""
    return Digest(blake3.blake3(DOMAIN).update(table).digest())


def table_bytes(samples: int) -> int:
    """Return the size of the table of a shard of so many samples, in bytes."""
    return samples * ROW_BYTES + COUNT_BYTES


@dataclass(frozen=True, slots=True)
class Shard:
    """A verified shard: its name and all of its bytes."""

    digest: Digest
    data: Bytes


def read_table(digest: Digest, data: Bytes, source: str) -> np.ndarray[Any, np.dtype[np.void]]:
    """Return the table (dtype ``ROW``) if it hashes to ``digest`` and fits ``data``; raise ``Corrupt`` if not."""
    size = len(data)
    if size < COUNT_BYTES:
        raise Corrupt(f"shard of {size} bytes is too short to hold a table", source)
    count = int.from_bytes(data[size - COUNT_BYTES :], "little")
    if count > (size - COUNT_BYTES) // ROW_BYTES:
        raise Corrupt(f"shard of {size} bytes claims {count} samples", source)
    start = size - table_bytes(count)
    if name_of(data[start:]) != digest:
        raise Corrupt("shard's table does not hash to its name", source)
    rows = np.frombuffer(data, ROW, count=count, offset=start)
    # The table hashed to its name, so it is what the shard's writer wrote. A hostile writer's lengths may overflow as
    # integers when they are summed, but not as floats.
    if float(rows["length"].sum(dtype=np.float64)) > size or int(rows["length"].sum()) != start:
        raise Corrupt(f"shard's table does not describe its {start} sample bytes", source)
    return rows


def verified(digest: Digest, data: Bytes, source: str) -> Shard:
    """Return ``data`` as the shard ``digest``, every sample of it checked; raise ``Corrupt`` naming ``source``."""
    view = memoryview(data)
    rows = read_table(digest, view, source)
    bad = rotten(rows, view)
    if bad:
        raise Corrupt(f"{len(bad)} of {len(rows)} samples of a shard do not hash to their digests", source, bad)
    return Shard(digest, data)


def rotten(rows: np.ndarray[Any, np.dtype[np.void]], data: Bytes) -> list[int]:
    """Return the positions of the samples whose bytes do not hash to their digest in ``rows``."""
    view = memoryview(data)
    ends = np.cumsum(rows["length"], dtype=np.int64).tolist()
    digests = np.ascontiguousarray(rows["digest"]).tobytes()
    bad = []
    start = 0
    for i, end in enumerate(ends):
        if blake3.blake3(view[start:end]).digest() != digests[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES]:
            bad.append(i)
        start = end
    return bad
