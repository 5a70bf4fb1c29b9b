"""Every contender hands out the same bytes; one that cannot run says why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.data import Data, Kind, make_data
from bench.measure import digests_of
from bench.peers.base import Peer, Work
from bench.peers.registry import PEERS, peer
from bench.servers import CannotRun

# Contenders that need another form of data, or a rack of their own for every round, and one that only copies another:
# the questions run them.
ELSEWHERE = {"gather", "origin", "quiver-cold", "quiver-decoded", "files-decoded", "quiver-rack-bytes"}


@pytest.fixture(scope="module")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return make_data(tmp_path_factory.mktemp("bench") / "data", "blobs", 40, 3_000)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return make_data(tmp_path_factory.mktemp("bench") / "data", "tokens", 40, 4_096)


def running(name: str, data: Data, folder: Path) -> Peer:
    """Return a prepared contender; skip the test with the reason if it cannot run here."""
    found = peer(name)(Work(data, 8, folder / "work"))
    try:
        found.check()
    except CannotRun as error:
        pytest.skip(str(error))
    found.prepare()
    return found


def expected(data: Data) -> tuple[str, str]:
    return digests_of(([data.sample(at)] for at in data.order.tolist()), None)


# Resources that other packages leak are not our fault.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", sorted(PEERS.keys() - ELSEWHERE))
def test_a_peer_delivers_the_bytes_of_the_data_in_their_order(name: str, blobs: Data, tmp_path: Path) -> None:
    found = running(name, blobs, tmp_path)
    try:
        # Ways with workers change the order and start processes; the first way has none.
        assert digests_of(found.batches(found.ways[0]), None) == expected(blobs)
    finally:
        found.close()


@pytest.mark.parametrize("name", ["gather", "mapped", "quiver-bytes", "sockets"])
def test_samples_of_one_size_are_the_same_however_they_are_stacked(name: str, tokens: Data, tmp_path: Path) -> None:
    found = running(name, tokens, tmp_path)
    try:
        assert digests_of(found.batches(found.ways[-1]), tokens.sample_bytes)[0] == expected(tokens)[0]
    finally:
        found.close()


def test_fetching_ahead_passes_on_errors() -> None:
    from bench.peers.ahead import ahead

    def failing() -> object:
        yield [b"one"]
        raise CannotRun("gone")

    coming = ahead(failing())  # type: ignore[arg-type]
    assert next(coming) == [b"one"]
    with pytest.raises(CannotRun, match="gone"):
        next(coming)


def test_a_missing_package_is_a_reason_that_says_what_to_install(
    blobs: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(CannotRun, match=r"redis.*install quiver-cache\[bench-redis\]"):
        peer("redis")(Work(blobs, 8, tmp_path)).check()


def test_a_missing_program_is_a_reason(blobs: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer("nginx"), "programs", ("no-such-server",))
    with pytest.raises(CannotRun, match="no program no-such-server on PATH"):
        peer("nginx")(Work(blobs, 8, tmp_path)).check()


@pytest.mark.parametrize("kind", ["blobs", "tokens"])
def test_equal_arguments_make_equal_data(kind: Kind, tmp_path: Path) -> None:
    first, second = (make_data(tmp_path / name, kind, 12, 4_096) for name in ("a", "b"))
    assert first.blob.read_bytes() == second.blob.read_bytes()
    assert first.order.tolist() == second.order.tolist()
    assert sorted(first.order.tolist()) == list(range(12))
