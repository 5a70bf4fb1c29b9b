"""Errors of a source that other programs may write to while it is indexed."""

from __future__ import annotations

from quiver.errors import QuiverError


class SourceChanged(QuiverError):
    """An object of the source changed or vanished between the listing and the end of its reading."""

    code = "source_changed"
    status = 409

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"{url} {why} while it was being indexed; index again when no program writes to it")
        self.url = url


class Stopped(Exception):
    """Raised inside a worker of a cancelled run: nobody waits for its result."""
