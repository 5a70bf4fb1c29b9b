"""Which requests a read of extents makes: adjacent extents share one, large runs are split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from quiver.origin.base import Extent

GAP_BYTES_MAX: Final = 4096  # reading 4 KiB too much costs less than another request; a tar header is 512 to 1536 bytes
RUN_BYTES_MAX: Final = 4 << 20  # larger runs are split, so that one shard is read over several connections


class ByteRun(NamedTuple):
    """One request: a run of bytes and the extents to be cut from it, as (offset in the run, length, offset in out)."""

    path: str
    start: int
    end: int
    cuts: list[tuple[int, int, int]]


def coalesce(extents: Sequence[Extent]) -> list[ByteRun]:
    """Merge adjacent extents (gap up to ``GAP_BYTES_MAX``) into requests of up to ``RUN_BYTES_MAX``."""
    runs: list[ByteRun] = []
    targets = []
    at = 0
    for extent in extents:
        targets.append((extent.path, extent.offset, extent.length, at))
        at += extent.length
    for path, offset, length, target in sorted(targets):
        while length:
            take = min(length, RUN_BYTES_MAX)
            last = runs[-1] if runs else None
            if (
                last is not None
                and last.path == path
                and offset <= last.end + GAP_BYTES_MAX
                and offset + take - last.start <= RUN_BYTES_MAX
            ):
                last.cuts.append((offset - last.start, take, target))
                runs[-1] = last._replace(end=max(last.end, offset + take))
            else:
                runs.append(ByteRun(path, offset, offset + take, [(0, take, target)]))
            offset, length, target = offset + take, length - take, target + take
    return runs
