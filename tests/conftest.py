"""What many tests share: a small dataset, and racks that no test hurts."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.support.daemon import Daemon, rack_of
from tests.support.data import Files, make_files, random_files

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell; children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the caches and settings of whoever runs it."""
    monkeypatch.delenv("QUIVER_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "xdg"))


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """150 samples in about twenty shards. Not to be changed by a test."""
    return make_files(tmp_path_factory.mktemp("files"), random_files(150))


@pytest.fixture(scope="session")
def rack(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Daemon]]:
    """Three daemons that may read ``files``. Not to be killed by a test."""
    with rack_of(3, tmp_path_factory.mktemp("rack"), origins=[files.folder]) as daemons:
        yield daemons


@pytest.fixture(scope="session")
def lone(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon alone that may read ``files``. Not to be killed by a test."""
    with Daemon(tmp_path_factory.mktemp("lone") / "data", origins=[files.folder]) as daemon:
        yield daemon
