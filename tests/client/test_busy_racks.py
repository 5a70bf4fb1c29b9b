"""A dataset opens in a rack whose machine is too busy to answer health checks at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from quiver.errors import Unavailable
from quiver.peer import PeerClient
from quiver_client import Dataset
from quiver_client.rack import members as members_module
from tests.support.daemon import Daemon, rack_of
from tests.support.data import Files

Make = Callable[..., Dataset]
PAUSE_SECONDS = 1.0  # longer than a batch would wait
PATIENCE_SECONDS = 60.0


def test_a_dataset_waits_for_a_daemon_that_stands_still_for_a_moment(
    dataset: Make, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = members_module.AT_OPEN._replace(silence_seconds=PATIENCE_SECONDS, alive_seconds=PATIENCE_SECONDS)
    monkeypatch.setattr(members_module, "AT_OPEN", patient)
    with Daemon(tmp_path / "data", origins=[files.folder]) as daemon:
        daemon.signal(signal.SIGSTOP)
        timer = threading.Timer(PAUSE_SECONDS, daemon.signal, [signal.SIGCONT])
        timer.start()
        try:
            made = dataset(files.manifest, daemon.url, fields=["__key__"])
        finally:
            timer.join()
        assert daemon.ask("GET", f"/v1/manifests/{made.manifest.digest}")[0] == 200


def test_a_daemon_that_sent_the_ring_and_then_was_late_is_sent_the_manifest(
    dataset: Make, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(peer: PeerClient) -> None:
        raise Unavailable(peer.url, "answers nothing")

    monkeypatch.setattr(PeerClient, "status", late)
    with rack_of(1, tmp_path, origins=[files.folder]) as (daemon,):
        made = dataset(files.manifest, daemon.url, fields=["__key__"])
        assert daemon.ask("GET", f"/v1/manifests/{made.manifest.digest}")[0] == 200
