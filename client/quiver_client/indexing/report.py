"""What indexing reports besides the manifest: counts, and everything skipped by name.

A million samples can have a million faults, so each kind of fault is counted in full and named up to ``NAMES_MAX``
times.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

NAMES_MAX: Final = 1000
NAMES_SHOWN: Final = 20  # in a line for people


@dataclass(frozen=True, slots=True)
class Notice:
    """One kind of fault that the user should know: ``names`` are the first of ``count`` affected."""

    what: str
    count: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        shown = ", ".join(self.names[:NAMES_SHOWN])
        more = self.count - min(len(self.names), NAMES_SHOWN)
        return f"{self.what} ({self.count}): {shown}" + (f" and {more} more" if more else "")


class Notices:
    """Collects notices. One per task, merged in the order of the tasks, so that the result is deterministic."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, list[str]]] = {}

    def add(self, what: str, *names: str, count: int | None = None) -> None:
        """Note that ``what`` happened to ``names``; ``count`` of them, if more than are named."""
        before, listed = self._found.get(what, (0, []))
        listed.extend(names[: NAMES_MAX - len(listed)])
        self._found[what] = before + (len(names) if count is None else count), listed

    def merge(self, other: Notices) -> None:
        for what, (count, names) in other._found.items():
            self.add(what, *names, count=count)

    def all(self) -> tuple[Notice, ...]:
        return tuple(Notice(what, count, tuple(names)) for what, (count, names) in self._found.items())


@dataclass(frozen=True, slots=True)
class Report:
    """The result of ``index``: ``bytes`` of ``distinct`` samples, in shards of at most ``shard_bytes``."""

    manifest: Path
    digest: str
    format: str
    layout: str
    shard_bytes: int
    samples: int
    distinct: int
    shards: int
    bytes: int
    reused_shards: int
    warnings: tuple[Notice, ...]
    name: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "manifest": str(self.manifest),
            "warnings": [asdict(notice) for notice in self.warnings],
        }
