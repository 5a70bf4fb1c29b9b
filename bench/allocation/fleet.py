"""The daemons of a run: three with a static ring, that together have the case's capacity."""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError

from bench.allocation.sources import Indexed, Origin, json_of
from bench.servers import SERVERS, Server, quiver_rack

NO_POLICY: Final = "none"
RING_SECONDS_MAX: Final = 30.0
_SHARD_FILE: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Fleet:
    """Running daemons. ``folder`` has a folder for each."""

    urls: tuple[str, ...]
    servers: tuple[Server, ...]
    folder: Path

    @property
    def cache(self) -> str:
        return ",".join(self.urls)

    def resident_bytes(self) -> list[int]:
        return [int(json_of(f"{url}/v1/status")["resident_bytes"]) for url in self.urls]

    def allocations(self) -> list[Any]:
        """Return what each daemon says of its allocation; nothing of older ones."""
        told = []
        for url in self.urls:
            with contextlib.suppress(HTTPError):
                told.append(json_of(f"{url}/v1/allocation"))
        return told

    def resident_of(self, indexed: Mapping[str, Indexed]) -> dict[str, float]:
        """Return the share of each dataset that is resident, as the folders of the daemons show."""
        held: dict[str, int] = {}
        for path in self.folder.glob("node*/data/**/*"):
            if _SHARD_FILE.fullmatch(path.name) and "quarantine" not in path.parts:
                with contextlib.suppress(OSError):  # evicted meanwhile
                    held[path.name] = path.stat().st_size
        return {
            name: sum(size for digest, size in held.items() if digest in it.digests) / it.total_bytes
            for name, it in indexed.items()
        }


@contextlib.contextmanager
def fleet(
    folder: Path,
    origin: Origin,
    indexed: Mapping[str, Indexed],
    capacity_bytes: float,
    *flags: str,
    ring: str = "",
) -> Iterator[Fleet]:
    """Run daemons. Each may use its part of the capacity, and has room for the manifests beside it.

    ``ring``: the URL of the etcd that keeps it; by default it is static.
    """
    manifests = sum(it.manifest.stat().st_size for it in indexed.values())
    each = int(capacity_bytes / SERVERS) + manifests
    with quiver_rack(folder, f"{origin.url}/", each, *flags, ring=ring) as (urls, servers):
        _await_ring(urls)
        yield Fleet(tuple(urls), tuple(servers), folder)


def _await_ring(urls: Sequence[str]) -> None:
    """Return once each daemon knows all of them."""
    deadline = time.monotonic() + RING_SECONDS_MAX
    while not all(len(json_of(f"{url}/v1/ring")["members"]) == len(urls) for url in urls):
        if time.monotonic() > deadline:
            raise SystemExit(f"the ring is not complete after {RING_SECONDS_MAX:.0f} s")
        time.sleep(0.05)


@functools.cache
def daemon_flags() -> frozenset[str]:
    """Return the flags that the daemon of this tree knows: an older one has no policies."""
    command = [sys.executable, "-m", "quiver_cacheserver.cli", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return frozenset(re.findall(r"--[a-z-]+", told))


def policy_flags(policy: str) -> Sequence[str]:
    """Return the daemon's flags for a policy. Raises ``SystemExit`` if it has none."""
    if "--policy" in daemon_flags():
        return ("--policy", policy)
    if policy != NO_POLICY:
        raise SystemExit(f"--policy {policy}: the daemons of this version have no policies")
    return ()
