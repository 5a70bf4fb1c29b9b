"""Things under a digest's name in the data directory that are no files of ours, in a daemon that runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quiver.peer import PeerClient
from quiver.store import Kind
from quiver.store.inventory import file_of
from quiver.wire import RANGE, RECHECK, RangeStatus, ReadRequest
from tests.daemon.test_routes import read
from tests.support.daemon import Daemon
from tests.support.data import Files
from tests.support.waiting import until

STRAYS: dict[str, Callable[[Path], object]] = {
    "link": lambda place: place.symlink_to(place.parent.parent.parent / "lock"),
    "folder": Path.mkdir,
    "fifo": os.mkfifo,
}


@pytest.mark.fault("C3")
@pytest.mark.parametrize("make", STRAYS.values(), ids=list(STRAYS))
def test_a_resident_shard_that_a_stray_replaced_is_filled_again(
    files: Files, tmp_path: Path, make: Callable[[Path], object]
) -> None:
    manifest = files.opened()
    shards = [manifest.shard_digest(number) for number in range(2)]
    rows = [(0, 0, 100), (1, 0, 100)]
    with (
        Daemon(tmp_path / "node", origins=[files.folder]) as daemon,
        contextlib.closing(PeerClient(daemon.url)) as peer,
    ):
        peer.put_manifest(manifest.digest, files.manifest.read_bytes())
        statuses, data = read(daemon, shards, rows, manifest.digest, wait=20_000)
        assert statuses == [RangeStatus.PRESENT] * 2
        place = file_of(daemon.data_dir, Kind.SHARD, shards[0])
        place.unlink()
        make(place)
        # An open file is served on, until a recheck looks at what has the name now.
        recheck = ReadRequest(None, tuple(shards), np.zeros(0, RANGE), 5_000, RECHECK).encode()
        assert daemon.ask("POST", "/v1/read", recheck)[0] == 200
        until(lambda: read(daemon, shards, rows, manifest.digest, wait=20_000) == (statuses, data))
        assert place.is_file()
        assert not place.is_symlink()
