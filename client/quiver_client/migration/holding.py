"""Keeps shards in a rack for a job that will resume there: a consumer that reads nothing, with a long lease.

What nobody reports on is evicted for any job that wants the room, a minute after it was last read. So while a rack is
warmed, and for some time after, each of its daemons is told what the job will need (``ConsumerReport.hold``). The hold
ends when that job begins, which then reports itself, or when it expires; nobody need be there to end it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

import blake3
import numpy as np
import numpy.typing as npt

from quiver.errors import Misconfigured, NotFound, QuiverError
from quiver.identity import Identity
from quiver.manifest import Manifest
from quiver.residency import CONSUMER_BYTES, ConsumerReport
from quiver.residency.messages import NeedsReport, NeedsStatus
from quiver_client.identity import identity_of, name_of
from quiver_client.rack.members import Members

MEMBERS_AT_ONCE: Final = 16
HOLDER: Final = "held by quiver warm"  # what operators see of it, if the job has no name in this process


def _whose() -> Identity:
    """Return what the environment says. What a launcher says is of the process that warms, not of the job to come."""
    try:
        whose = identity_of(environment={name: text for name, text in os.environ.items() if name.startswith("QUIVER_")})
    except ValueError as error:
        raise Misconfigured(str(error)) from error
    return whose if whose.job else replace(whose, job=HOLDER)


class Hold:
    """What is kept of one dataset in one rack."""

    def __init__(self, manifest: Manifest, members: Members, left: npt.NDArray[np.uint8]) -> None:
        """``left`` ``(shards,)``: 255ths of each shard that the job still needs."""
        self._manifest = manifest
        self._members = members
        # Warming by the same state again replaces the hold instead of adding one.
        of = b"quiver-hold\0" + bytes(manifest.digest) + left.tobytes()
        self._report = ConsumerReport(
            consumer=blake3.blake3(of).digest(CONSUMER_BYTES),
            left=left,
            rate=0.0,
            ahead_bytes=0.0,
            lease_seconds=0.0,
            identity=_whose(),
            dataset_name=name_of(manifest, manifest.path.name),
            hold=True,
        )

    def renew(self, seconds: float) -> list[QuiverError]:
        """Keep it for so long from now; return why some daemons do not."""
        return self._tell(NeedsReport(self._manifest.digest, replace(self._report, lease_seconds=seconds)))

    def end(self) -> None:
        """Keep it no longer."""
        self._tell(NeedsReport(self._manifest.digest, self._report, leaving=True))

    def _tell(self, told: NeedsReport) -> list[QuiverError]:
        ring = self._members.ring
        urls = [member.url for member in ring.members] if ring is not None else []
        with ThreadPoolExecutor(MEMBERS_AT_ONCE) as pool:
            errors: Iterable[QuiverError | None] = pool.map(lambda url: self._tell_one(url, told), urls)
            return [error for error in errors if error is not None]

    def _tell_one(self, url: str, told: NeedsReport) -> QuiverError | None:
        peer = self._members.peer(url)
        try:
            status = peer.needs(told).status
            if status is NeedsStatus.NO_MANIFEST and not told.leaving:
                self._members.put_manifest(peer, self._manifest)
                status = peer.needs(told).status
        except NotFound:
            return NotFound(f"{url} takes no reports of needs, and keeps what is warmed no longer than other files")
        except QuiverError as error:
            return error
        if status is not NeedsStatus.TAKEN:
            return NotFound(f"{url} has too many consumers, and keeps what is warmed no longer than other files")
        return None
