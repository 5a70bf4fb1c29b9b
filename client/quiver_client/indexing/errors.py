"""What can go wrong with a source that is read while somebody else may write to it."""

from __future__ import annotations

from quiver.errors import QuiverError


class SourceChanged(QuiverError):
    """An object of the source changed or vanished between the listing and the end of its reading."""

    code = "source_changed"
    status = 409

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"{url} {why} while it was being indexed; index again when nothing writes to it any more")
        self.url = url


class Stopped(Exception):
    """Raised inside a worker whose run was given up: nobody waits for what it was doing."""
