"""A static rack, from a list of the operator's."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.errors import BadRequest, Misconfigured
from quiver.ring import Member, check_member, static_id
from quiver_cacheserver.rack.addresses import parse_endpoints
from quiver_cacheserver.rack.etcd_registry import EtcdRegistry
from quiver_cacheserver.rack.registry import StaticRegistry

A, B, C = "http://node-a:7717", "http://node-b:7717", "http://[fd00::1]:7717"


async def test_a_daemon_alone_is_a_ring_of_one_under_its_own_name_and_capacity() -> None:
    own = Member("me", A, 3e9)
    async with StaticRegistry("r", own) as registry:
        assert registry.ring.members == (own,)
        assert registry.own == own
        assert await registry.wait_until_registered()
        assert (registry.age_seconds, registry.ignored_total) == (0.0, 0)


def test_all_daemons_compute_the_same_ring_whatever_their_names_capacities_and_order() -> None:
    rings = {
        StaticRegistry("r", Member(f"n{i}", url, 1e9 * i + 1), peers).ring
        for i, (url, peers) in enumerate([(A, [A, B, C]), (B, [C, B, A]), (C, [A, B, C + "/"]), (A, [B, C])])
    }
    assert len(rings) == 1
    assert len(rings.pop().members) == 3


def test_self_is_recognised_in_the_list_and_added_if_missing() -> None:
    listed = StaticRegistry("r", Member("me", A.upper().replace("HTTP", "http") + "/"), [A, B])
    assert (listed.own.id, len(listed.ring.members)) == ("node-a-7717", 2)
    assert StaticRegistry("r", Member("me", C), [A, B]).own in StaticRegistry("r", Member("me", C), [A, B]).ring.members


async def test_a_draining_daemon_owns_nothing_in_the_ring_that_it_serves() -> None:
    registry = StaticRegistry("r", Member("me", A), [A, B])
    async with registry, asyncio.TaskGroup() as group:
        waiting = group.create_task(registry.changed())
        await asyncio.sleep(0)  # the task begins to wait
        await registry.drain()
        await waiting
    assert [registry.ring.members[i].url for i in registry.ring.owning] == [B]


async def test_a_daemon_that_drains_no_more_owns_its_shards_again() -> None:
    registry = StaticRegistry("r", Member("me", A), [A, B])
    before = registry.ring
    async with registry:
        await registry.drain()
        await registry.undrain()
    assert registry.ring == before
    assert registry.own.state == "up"


@given(st.lists(st.tuples(st.from_regex(r"[a-z0-9.:-]{1,80}", fullmatch=True), st.integers(1, 65535)), max_size=8))
def test_a_name_made_of_a_url_is_a_node_id_and_two_urls_never_share_one(addresses: list[tuple[str, int]]) -> None:
    names = {}
    for host, port in addresses:
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        try:
            name = static_id(url)
        except BadRequest:
            continue
        assert check_member(Member(name, url)).id == name
        assert names.setdefault(name, url) == url


@pytest.mark.parametrize("peer", ["node-b:7717", "ftp://node-b:7717", "http://node-b:7717/x", "http://:7717"])
def test_a_peer_that_is_not_a_url_of_a_daemon_is_refused(peer: str) -> None:
    with pytest.raises(BadRequest, match="expected http://HOST:PORT"):
        StaticRegistry("r", Member("me", A), [peer])


@pytest.mark.parametrize("rack", ["", "a/b", "..", "r" * 65, "a b"])
def test_a_rack_name_that_would_leave_its_folder_in_etcd_is_refused(rack: str) -> None:
    with pytest.raises(Misconfigured, match="not a rack name"):
        StaticRegistry(rack, Member("me", A))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "node1:2379",
        "http://node1",
        "http://",
        "http://:secret@",
        "http://h:1/x",
        "http://u:secret@h:x",
        "http://secret@h:1",
    ],
)
def test_a_url_that_is_not_an_etcd_s_is_refused_without_showing_a_password(url: str) -> None:
    with pytest.raises(Misconfigured, match="etcd") as refused:
        parse_endpoints(url)
    assert "secret" not in str(refused.value)


def test_etcd_over_https_is_refused_by_name() -> None:
    with pytest.raises(Misconfigured, match="https is not supported"):
        parse_endpoints("https://node1:2379")


def test_the_text_of_an_endpoint_has_no_password() -> None:
    first, second = parse_endpoints("http://user:p%40ss@node1:2379, http://[::1]:2379")
    assert (first.username, first.password) == ("user", "p@ss")
    assert "ss" not in str(first) + repr(first)
    assert str(second) == "etcd at http://[::1]:2379"


async def test_a_lease_too_short_to_keep_is_refused() -> None:
    with pytest.raises(Misconfigured, match="at least 1 s"):
        EtcdRegistry("http://127.0.0.1:1", "r", Member("me", A), ttl_seconds=0.5)
