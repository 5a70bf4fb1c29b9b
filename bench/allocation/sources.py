"""The datasets of a case, and the origin that serves them: throttled, and counting what it sends of each.

A dataset is one tar whose samples lie in the order of their shards, so that a shard is one range of it. What a tar puts
between samples is sent as well; ``overhead`` says how much that is, and the origin's limit allows for it.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import sys
import tarfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from blake3 import blake3

from bench.allocation.cases import Source
from bench.servers import LOOPBACK, Server, free_ports
from quiver.manifest import Manifest

LATENCY_MS: Final = 5.0


@dataclass(frozen=True)
class Indexed:
    """A dataset on the origin. ``overhead``: bytes that the origin sends per byte of samples."""

    name: str
    manifest: Path
    samples: int
    total_bytes: int
    shards: int
    overhead: float
    digests: frozenset[str]
    file: str  # as the origin counts it


class Origin:
    """The running origin, as the bench sees it."""

    def __init__(self, folder: Path, port: int, pid: int) -> None:
        self.folder = folder
        self.pid = pid
        self.url = f"http://{LOOPBACK}:{port}"

    def limit(self, bytes_per_second: float) -> None:
        """Limit all its answers together; 0: no limit."""
        text_of(f"{self.url}/-/limit/{bytes_per_second:.0f}/{LATENCY_MS}")

    def sent(self) -> dict[str, int]:
        """Return the bytes sent since it started, by file."""
        told: dict[str, int] = json.loads(text_of(f"{self.url}/-/counts"))
        return told


@contextlib.contextmanager
def origin(folder: Path) -> Iterator[Origin]:
    """Run an origin that serves the folder's ``origin``."""
    (port,) = free_ports(1)
    served = folder / "origin"
    served.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "bench.origin", str(served), str(port)]
    with Server(command, folder / "origin.log") as server:
        server.wait_for_port(port)
        yield Origin(served, port, server.pid)


def prepare(sources: Sequence[Source], folder: Path, origin: Origin) -> dict[str, Indexed]:
    """Write the datasets that are not there yet, and index them where the origin serves them."""
    return {it.name: _prepared(it, folder, origin) for it in sources}


def _prepared(source: Source, folder: Path, origin: Origin) -> Indexed:
    name = f"{source.name}-{source.size_bytes}-{source.sample_bytes}"
    manifest = folder / f"{name}.quiver"
    if not manifest.exists():
        _write_tar(origin.folder / f"{name}.tar", source)
        # In a process of its own: indexing starts threads, and this process will be forked.
        process = multiprocessing.get_context("fork").Process(
            target=_index, args=(f"{origin.url}/{name}.tar", manifest)
        )
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{name}: it cannot be indexed")
    opened = Manifest.open(manifest)
    sizes = opened.tables.shard_sizes
    payload = len(opened) * source.sample_bytes
    tar_bytes = (origin.folder / f"{name}.tar").stat().st_size
    digests = frozenset(str(digest) for digest in opened.shard_numbers)  # as files are named
    return Indexed(
        source.name, manifest, len(opened), int(sizes.sum()), len(sizes), tar_bytes / payload, digests, f"{name}.tar"
    )


def _index(url: str, manifest: Path) -> None:
    from quiver_client import index

    index(url, str(manifest), layout="mixed")  # the shard size is what users get


def _write_tar(target: Path, source: Source) -> None:
    """Write samples in the order of their digests, which is that of the shards of the layout ``mixed``."""
    seed = int.from_bytes(blake3(source.name.encode()).digest()[:4], "big")
    rng = np.random.default_rng(seed)
    contents = [rng.bytes(source.sample_bytes) for _ in range(source.size_bytes // source.sample_bytes)]
    contents.sort(key=lambda content: blake3(content).digest())
    with tarfile.open(target, "w", format=tarfile.USTAR_FORMAT) as tar:
        for serial, content in enumerate(contents):
            info = tarfile.TarInfo(f"{serial:06}.bin")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def text_of(url: str, timeout_seconds: float = 10.0) -> str:
    with urllib.request.urlopen(url, timeout=timeout_seconds) as answer:
        text: str = answer.read().decode()
    return text


def json_of(url: str) -> Any:
    return json.loads(text_of(url))


def overhead_of(indexed: Mapping[str, Indexed]) -> float:
    """Return the bytes that the origin sends per byte of samples, over all datasets."""
    return sum(it.overhead * it.total_bytes for it in indexed.values()) / sum(it.total_bytes for it in indexed.values())
