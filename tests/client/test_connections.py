"""How many connections a reader process holds: of a rack's two thousand, each daemon hears them all."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from quiver_client import DataLoader, Dataset
from tests.support.daemon import Daemon, rack_of
from tests.support.data import Files

pytestmark = pytest.mark.usefixtures("patient_reads")


def connections_of(pid: int, url: str) -> int:
    """Return how many connections to a daemon a process has open."""
    port = f":{urlsplit(url).port or 0:04X}"
    # sl, local address, remote address, state, ..., inode: established, or waiting to be closed by this side
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    to_it = {row[9] for row in rows if row[2].endswith(port) and row[3] in ("01", "08")}
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found += entry.readlink().name.removeprefix("socket:[").removesuffix("]") in to_it
        except OSError:  # closed meanwhile
            continue
    return found


class Counting:
    """A transform that notes, in the process that reads, how many connections to each daemon it has."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {"pid": os.getpid(), "open": [connections_of(os.getpid(), url) for url in self.urls]}


@pytest.fixture
def rack(files: Files, tmp_path: Path) -> Iterator[list[Daemon]]:
    with rack_of(2, tmp_path, origins=[files.folder]) as daemons:
        yield daemons


@pytest.mark.parametrize(
    ("kind", "context"),
    [(torch.utils.data.DataLoader, "fork"), (torch.utils.data.DataLoader, "spawn"), (DataLoader, "fork")],
    ids=["stock, forked", "stock, spawned", "ours, forked"],
)
def test_a_worker_holds_one_stream_and_at_most_one_more_connection_per_daemon(
    rack: list[Daemon], files: Files, dataset: Callable[..., Dataset], kind: type[Any], context: str
) -> None:
    urls = [daemon.url for daemon in rack]
    made = dataset(files.manifest, urls[0], transform=Counting(urls))
    assert made[0]["pid"] == os.getpid(), "the parent has connections of its own"
    more = {"num_workers": 2, "multiprocessing_context": context, "persistent_workers": True}
    loader = kind(made, batch_size=8, shuffle=True, collate_fn=list, **more)
    seen: Counter[int] = Counter()
    for _ in range(2):
        for batch in loader:
            for sample in batch:
                seen[sample["pid"]] += 1
                assert max(sample["open"]) <= 2, "a stream, and one for the rest"
    assert len(seen) == 2
    assert os.getpid() not in seen


def test_a_dataset_that_is_closed_leaves_no_connection_open(
    rack: list[Daemon], files: Files, dataset: Callable[..., Dataset]
) -> None:
    made = dataset(files.manifest, rack[0].url)
    for _ in range(3):
        made.__getitems__(list(range(len(made))))
    assert all(1 <= connections_of(os.getpid(), daemon.url) <= 2 for daemon in rack)
    made.close()
    assert not any(connections_of(os.getpid(), daemon.url) for daemon in rack)
