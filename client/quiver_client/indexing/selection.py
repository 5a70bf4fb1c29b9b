"""Which fields of a source become fields of the samples: ``--fields`` and ``--exclude``."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from quiver.errors import Misconfigured


class Selection:
    """The fields to take (all if none are named) less those to exclude. Checks that the names exist."""

    def __init__(self, fields: Collection[str] | None = None, exclude: Collection[str] = ()) -> None:
        both = sorted(set(fields or ()) & set(exclude))
        if both:
            raise Misconfigured(f"field {both[0]!r} is in both --fields and --exclude; remove it from one")
        if fields is not None and not fields:
            raise Misconfigured("--fields names no field; name at least one, or omit --fields to take all")
        self._fields = None if fields is None else frozenset(fields)
        self.excluded = frozenset(exclude)

    @property
    def takes_all(self) -> bool:
        return self._fields is None and not self.excluded

    def takes(self, name: str) -> bool:
        return name not in self.excluded and (self._fields is None or name in self._fields)

    def check(self, present: Iterable[str], where: str) -> None:
        """Raise ``Misconfigured`` if a named field does not exist."""
        there = sorted(set(present))
        unknown = sorted(((self._fields or frozenset()) | self.excluded) - set(there))
        if unknown:
            raise Misconfigured(f"{where} has no field {unknown[0]!r}; it has {', '.join(there) or 'none'}")
