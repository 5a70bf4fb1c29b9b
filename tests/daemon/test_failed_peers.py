"""Which peers a daemon asks for a shard, and which it passes over for a while."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from quiver.digest import Digest
from quiver.errors import Corrupt, OverCapacity, Unavailable
from quiver.ring import Member, Ring
from quiver_cacheserver.rack.peers import RackPeers
from quiver_cacheserver.rack.registry import StaticRegistry

SHARD = Digest.of(b"a shard")


@pytest.fixture
def peers() -> RackPeers:
    own = Member("a", "http://a:1")
    return RackPeers(StaticRegistry("r", own, [f"http://{name}:1" for name in "bc"]), "a", own.url)


def urls(peers: RackPeers) -> set[str]:
    return {peer.url for peer in peers.holders(SHARD)}


@pytest.mark.fault("N2")
@pytest.mark.parametrize("error", [Unavailable("b", "no answer"), Corrupt("wrong bytes", "b")], ids=["silent", "wrong"])
def test_a_peer_that_failed_is_passed_over_until_it_delivers(peers: RackPeers, error: Exception) -> None:
    with contextlib.closing(peers):
        assert urls(peers) == {"http://b:1", "http://c:1"}
        failed = next(peer for peer in peers.holders(SHARD) if peer.url == "http://b:1")
        peers.failed(failed, error)  # type: ignore[arg-type]
        assert urls(peers) == {"http://c:1"}
        peers.delivered(failed, 1000, 0.001)
        assert urls(peers) == {"http://b:1", "http://c:1"}


def test_a_peer_that_left_the_ring_is_probed_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now, probed = [0.0], list[str]()
    monkeypatch.setattr("quiver_cacheserver.rack.peers.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("quiver_cacheserver.rack.peers.is_alive", lambda url, seconds, tls: probed.append(url))
    members = [Member(name, f"http://{name}:1") for name in "abc"]
    registry = SimpleNamespace(ring=Ring.of("r", members, 1))
    peers = RackPeers(registry, "a", members[0].url)  # type: ignore[arg-type]
    with contextlib.closing(peers):
        for peer in peers.holders(SHARD):
            peers.failed(peer, Unavailable(peer.url, "no answer"))
        registry.ring = Ring.of("r", members[:2], 1)
        now[0] = 5.0
        assert urls(peers) == set()
        peers._prober.shutdown()
        assert probed == ["http://b:1"]


def test_a_rack_whose_addresses_change_keeps_clients_of_its_present_members_alone() -> None:
    own = Member("a", "http://a:1")
    registry = SimpleNamespace(ring=Ring.of("r", [own], 1))
    peers = RackPeers(registry, "a", own.url)  # type: ignore[arg-type]
    with contextlib.closing(peers):
        for number in range(20):
            registry.ring = Ring.of("r", [own, Member("b", f"http://b{number}:1")], 1)
            assert urls(peers) == {f"http://b{number}:1"}
            assert len(peers._peers) == 1


def test_a_peer_that_is_busy_is_asked_again_and_oneself_never(peers: RackPeers) -> None:
    with contextlib.closing(peers):
        busy = next(iter(peers.holders(SHARD)))
        peers.failed(busy, OverCapacity("busy", 1.0))
        assert urls(peers) == {"http://b:1", "http://c:1"}
