"""No digest in anything that a daemon logs or shows, whatever goes wrong: who knows a digest may read what it names."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quiver.digest import Digest
from quiver.errors import BadRequest
from quiver.fill import OriginShards
from quiver.manifest import Manifest
from quiver.origin import open_origin
from quiver.peer import PeerClient
from quiver.residency import ConsumerReport
from quiver.residency.messages import NeedsReport
from quiver.store import Kind
from quiver.store.inventory import file_of
from quiver.wire import RANGE, RECHECK, RangeStatus, ReadRequest
from quiver_cacheserver.logs import FORMAT, OneLine
from tests.daemon.test_routes import read
from tests.support.daemon import Daemon
from tests.support.data import Files, make_files, make_shard, random_files, rewritten
from tests.support.waiting import until


@pytest.fixture
def small(tmp_path: Path) -> Files:
    return make_files(tmp_path, random_files(12, seed=8, low=3_000, high=4_000), name="small", shard_bytes="8KiB")


def known_digests(manifest: Manifest) -> set[Digest]:
    shards = {manifest.shard_digest(number) for number in range(manifest.shard_count)}
    samples = {Digest(row.tobytes()) for row in manifest.tables.digests}
    return {manifest.digest, *shards, *samples}


def quoted(text: str, digests: set[Digest]) -> list[str]:
    """Return the lines in which a digest stands, or as much of one as nobody would guess."""
    return [line for line in text.splitlines() if any(digest.hex()[:10] in line.lower() for digest in digests)]


def test_failing_fills_and_hostile_requests_leave_no_digest_in_any_line(small: Files, tmp_path: Path) -> None:
    manifest = small.opened()
    digests = known_digests(manifest)
    lying = Manifest.open(
        rewritten(small.manifest, tmp_path / "lying.quiver", lambda header: header.update(layout="sequential"))
    )
    digests.add(lying.digest)
    first, second, third = (manifest.shard_digest(number) for number in range(3))
    with (
        Daemon(tmp_path / "node", "--log-level", "debug", origins=[small.folder]) as daemon,
        contextlib.closing(PeerClient(daemon.url)) as peer,
    ):
        peer.put_manifest(manifest.digest, small.manifest.read_bytes())
        assert read(daemon, [first, second], [(0, 0, 1), (1, 0, 1)], manifest.digest, wait=20_000)[0] == [0, 0]
        # Rot on disk, found by a recheck; a manifest that rots; things in the place of files.
        place = file_of(daemon.data_dir, Kind.SHARD, first)
        place.write_bytes(b"rotten" + place.read_bytes()[6:])
        recheck = ReadRequest(None, (first, second), np.zeros(0, RANGE), 5_000, RECHECK).encode()
        assert daemon.ask("POST", "/v1/read", recheck)[0] == 200
        until(lambda: "quarantined" in daemon.log)
        folder = file_of(daemon.data_dir, Kind.SHARD, third).parent
        folder.mkdir(exist_ok=True)
        file_of(daemon.data_dir, Kind.SHARD, third).mkdir()
        # The origin lost everything: each fill fails, and says so.
        for path in small.folder.rglob("*.png"):
            path.unlink()
        shards = [manifest.shard_digest(number) for number in range(manifest.shard_count)]
        rows = [(at, 0, 1) for at in range(len(shards))]
        until(lambda: RangeStatus.FAILED in read(daemon, shards, rows, manifest.digest, wait=2_000)[0])
        until(lambda: "was not filled" in daemon.log)
        told = NeedsReport(
            manifest.digest, ConsumerReport(bytes(16), np.full(len(shards), 255, np.uint8), 1e6, 0.0, 5.0)
        )
        daemon.ask("POST", "/v1/needs", told.encode())
        # What is put and is not what its name says, or cannot be opened.
        bad, data = make_shard([b"a sample"])
        digests.add(bad)
        for digest in (bad, manifest.digest):
            for kind in Kind:
                daemon.ask("PUT", f"/v1/{kind}/{digest}", data[:-1] + b"?")
        junk = Digest.of(b"junk")
        digests.add(junk)
        assert daemon.ask("PUT", f"/v1/manifests/{junk}", b"junk")[0] == 400
        for text in (str(bad).upper(), f"{bad}0", f"{bad}%0a", f"../{bad}"):
            daemon.ask("GET", f"/v1/shards/{text}")
        peer.put_manifest(lying.digest, lying.path.read_bytes())
        unknown = Digest.of(b"nobody has it")
        digests.add(unknown)
        read(daemon, [unknown], [(0, 0, 1)], unknown)
        shown = [daemon.ask("GET", path)[1].decode() for path in ("/metrics", "/v1/status", "/v1/ring", "/healthz")]
    # A manifest on disk that is not what its name says, found when it is opened after a restart.
    file_of(daemon.data_dir, Kind.MANIFEST, manifest.digest).write_bytes(lying.path.read_bytes())
    file_of(daemon.data_dir, Kind.MANIFEST, lying.digest).write_bytes(b"rotten")
    with Daemon(tmp_path / "node", "--log-level", "debug", origins=[small.folder]) as again:
        for digest in (manifest.digest, lying.digest):
            assert read(again, [first], [(0, 0, 1)], digest)[0] != [RangeStatus.PRESENT]
        until(lambda: again.log.count("manifest put aside") == 2)
    log = daemon.log + again.log
    assert not quoted(log, digests)
    assert not quoted("".join(shown), digests)
    assert not re.search(r"[0-9a-f]{32}", log.lower())
    assert "[digest]" not in log, "no message is made with a digest in it: none had to be left out"


def test_a_fill_that_fails_does_not_say_where_the_manifest_lies(small: Files) -> None:
    opened = small.opened()
    names = opened.tables.shard_digests[::-1].copy()
    lying = Manifest(
        Path(f"/data/manifests/{opened.digest}"), opened.header, replace(opened.tables, shard_digests=names)
    )
    source = OriginShards(lying, open_origin(opened))
    with pytest.raises(BadRequest, match="not named by its samples") as failed:
        source.load(lying.shard_digest(0), int(opened.tables.shard_sizes[0]))
    assert not quoted(str(failed.value), {opened.digest})


def test_what_looks_like_a_digest_is_left_out_of_messages_and_tracebacks() -> None:
    told = io.StringIO()
    handler = logging.StreamHandler(told)
    handler.setFormatter(OneLine(FORMAT))
    digest = Digest.of(b"a")
    try:
        raise OSError(f"/data/shards/{digest.hex()[:2]}/{digest}")
    except OSError:
        arguments = (str(digest).upper(), 1_700_000_000_123_456_789)
        handler.handle(
            logging.getLogger("x").makeRecord("x", logging.WARNING, "f", 1, "%s at %d", arguments, sys.exc_info())
        )
    lines = told.getvalue().splitlines()
    assert lines[0].endswith("WARNING x: [digest] at 1700000000123456789")
    assert lines[-1].endswith("/[digest]")
    assert str(digest)[:10] not in told.getvalue().lower()
