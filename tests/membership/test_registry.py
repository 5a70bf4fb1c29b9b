"""A rack in a real etcd that is frozen, killed, wiped and given false records. Every wait has a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import uvloop

from quiver.errors import Misconfigured, Unavailable
from quiver.ring import Member
from quiver_cacheserver.rack import etcd_registry as registry_module
from quiver_cacheserver.rack.addresses import EtcdEndpoint
from quiver_cacheserver.rack.etcd import Etcd as Client
from quiver_cacheserver.rack.etcd_registry import EtcdRegistry
from tests.support.etcd import Etcd, free_ports

TTL = 1.5
"""etcd grants whole seconds, here two. The registry's timers use 1.5."""
GRANTED = 2.0
_racks = itertools.count()


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with Etcd() as running:
        yield running


@pytest.fixture
def rack() -> str:
    return f"rack-{next(_racks)}"


def daemon(etcd: Etcd | str, rack: str, name: str = "a", port: int = 1, **more: Any) -> EtcdRegistry:
    url = etcd if isinstance(etcd, str) else etcd.url
    return EtcdRegistry(url, rack, Member(name, f"http://{name}.test:{port}", 1e9), **{"ttl_seconds": TTL, **more})


async def until(registry: EtcdRegistry, condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until the condition holds; it is evaluated at each change of the registry."""
    try:
        async with asyncio.timeout(seconds):
            while not condition():
                await registry.changed()
    except TimeoutError:
        raise AssertionError(f"not within {seconds} s: {registry!r} {registry.ring}") from None


def ids(registry: EtcdRegistry) -> str:
    return "".join(member.id for member in registry.ring.members)


@contextlib.asynccontextmanager
async def members(etcd: Etcd, rack: str, names: str) -> AsyncIterator[list[EtcdRegistry]]:
    """Run daemons that all know each other."""
    async with contextlib.AsyncExitStack() as stack:
        running = [await stack.enter_async_context(daemon(etcd, rack, name)) for name in names]
        for each in running:
            await until(each, lambda each=each: each.registered and ids(each) == names)
        yield running


class Flaps:
    """Counts the changes of a registry's ring."""

    def __init__(self, registry: EtcdRegistry) -> None:
        self.registry, self.rings = registry, [ids(registry)]

    async def __aenter__(self) -> Flaps:
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        self._task = self._group.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await self._group.__aexit__(None, None, None)

    async def _follow(self) -> None:
        while True:
            await self.registry.changed()
            if ids(self.registry) != self.rings[-1]:
                self.rings.append(ids(self.registry))


def key(rack: str, name: str) -> str:
    return f"/quiver/racks/{rack}/members/{name}"


def lease_of(etcd: Etcd, rack: str, name: str) -> str:
    found = re.search(r'"Lease" : (\d+)', etcd.ctl("get", "--write-out=fields", key(rack, name)))
    assert found
    return f"{int(found[1]):x}"


# Without faults ------------------------------------------------------------------------------------------------------


async def test_joins_and_orderly_leaves_are_seen_at_once(etcd: Etcd, rack: str) -> None:
    async with members(etcd, rack, "ab") as (a, b):
        assert a.ring == b.ring
        async with daemon(etcd, rack, "c", ttl_seconds=60.0) as c:
            assert await c.wait_until_registered()
            await until(a, lambda: ids(a) == "abc")
        await until(a, lambda: ids(a) == "ab")  # the lease of c would have kept it for a minute
        assert 0 <= a.age_seconds < TTL


async def test_racks_do_not_see_each_other(etcd: Etcd, rack: str) -> None:
    async with members(etcd, rack, "a") as (a,), members(etcd, rack + "0", "b"):
        assert ids(a) == "a"


async def test_a_daemon_that_drains_owns_nothing_and_stays_in_the_ring(etcd: Etcd, rack: str) -> None:
    async with members(etcd, rack, "ab") as (a, b):
        await b.drain()
        assert b.own.state == "draining"
        await until(a, lambda: [a.ring.members[i].id for i in a.ring.owning] == ["a"])
        assert ids(a) == ids(b) == "ab"


@pytest.mark.fault("M1")
async def test_a_killed_member_leaves_the_ring_within_the_ttl_and_a_second(etcd: Etcd, rack: str) -> None:
    script = (
        "import asyncio, sys\n"
        "from quiver.ring import Member\n"
        "from quiver_cacheserver.rack.etcd_registry import EtcdRegistry\n"
        "async def main():\n"
        "    async with EtcdRegistry(sys.argv[1], sys.argv[2], Member('b', 'http://b:1'), ttl_seconds=2.0):\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    async with members(etcd, rack, "a") as (a,):
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, etcd.url, rack)
        try:
            await until(a, lambda: ids(a) == "ab", 20.0)
        finally:
            process.send_signal(signal.SIGKILL)
            killed_at = time.monotonic()
            await process.wait()
        await until(a, lambda: ids(a) == "a")
        assert time.monotonic() - killed_at <= 2.0 + 1.0


# etcd fails ----------------------------------------------------------------------------------------------------------


@pytest.mark.fault("M3")
async def test_without_an_etcd_a_daemon_serves_alone_says_so_once_and_joins_when_there_is_one(
    rack: str, caplog: pytest.LogCaptureFixture
) -> None:
    etcd = Etcd()
    try:
        async with daemon(etcd, rack) as a:
            began = time.monotonic()
            assert not await a.wait_until_registered(), "the daemon does not wait for an unreachable etcd"
            assert time.monotonic() - began < 2.0
            assert ids(a) == "a"
            assert "a ring of this daemon alone" in a.problem
            etcd.start()
            assert await a.wait_until_registered(10.0)
            assert a.problem == ""
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(warnings) == 1
        assert f"etcd at http://127.0.0.1:{etcd.client_port}" in warnings[0]
        assert "Check that etcd runs there" in warnings[0]
    finally:
        etcd.__exit__(None, None, None)


@pytest.mark.fault("M3")
async def test_a_restart_of_etcd_moves_no_member_and_causes_no_write(rack: str) -> None:
    with Etcd() as etcd:
        async with members(etcd, rack, "ab") as (a, b), Flaps(a) as flaps:
            await asyncio.to_thread(etcd.stop)
            await until(a, lambda: not a.state.connected)
            await asyncio.to_thread(etcd.start)
            await until(a, lambda: a.state.connected and a.state.watching)
            await until(b, lambda: b.state.connected and b.state.watching)
            assert flaps.rings == ["ab"]
            assert '"Version" : 1\n' in etcd.ctl("get", "--write-out=fields", key(rack, "a"))
            async with daemon(etcd, rack, "c"):
                await until(a, lambda: ids(a) == "abc", 5.0)


@pytest.mark.fault("M3")
@pytest.mark.parametrize("how", ["frozen", "killed"])
async def test_an_outage_of_etcd_longer_than_a_lease_moves_no_member(how: str, rack: str) -> None:
    with Etcd() as etcd:
        async with members(etcd, rack, "abc") as daemons, Flaps(daemons[0]) as flaps:
            leases = {each: each.state.lease for each in daemons}
            etcd.freeze() if how == "frozen" else await asyncio.to_thread(etcd.kill)
            for each in daemons:  # failed attempts to reach etcd wake this loop
                await until(each, lambda each=each: not each.state.connected and each.age_seconds > GRANTED + 0.5)
            assert {ids(each) for each in daemons} == {"abc"}
            etcd.thaw() if how == "frozen" else await asyncio.to_thread(etcd.start)
            for each in daemons:
                # A frozen etcd revokes every lease, since its clock continued; a restarted one renews every lease.
                await until(each, lambda each=each: (each.state.lease != leases[each]) == (how == "frozen"))
                await until(each, lambda each=each: each.state.connected and each.registered and not each.state.kept)
            assert flaps.rings == ["abc"]


@pytest.mark.fault("M3")
async def test_daemons_register_again_with_an_etcd_that_lost_its_data_and_no_member_moves(rack: str) -> None:
    with Etcd() as etcd:
        async with members(etcd, rack, "ab") as (a, b), Flaps(a) as flaps:
            etcd.ctl("put", "/other", "1")
            await asyncio.to_thread(etcd.wipe)
            for each in (a, b):
                await until(each, lambda each=each: each.state.connected and each.registered and not each.state.kept)
            assert flaps.rings == ["ab"]
            async with daemon(etcd, rack, "c"):
                await until(a, lambda: ids(a) == "abc", 5.0)


async def test_leaving_is_quick_while_etcd_is_frozen(rack: str) -> None:
    with Etcd() as etcd:
        async with members(etcd, rack, "a"):
            etcd.freeze()
            began = time.monotonic()
        assert time.monotonic() - began < 2.0


async def test_the_next_endpoint_is_tried_if_one_is_dead(etcd: Etcd, rack: str) -> None:
    dead = f"http://127.0.0.1:{free_ports(1)[0]}"
    async with daemon(f"{dead},{etcd.url}", rack) as a:
        assert await a.wait_until_registered(5.0)


async def test_the_session_with_etcd_restarts_after_any_exception(
    etcd: Etcd, rack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, failed = Client.list, []

    async def list_once_broken(self: Client, prefix: str) -> Any:
        if not failed:
            failed.append(True)
            raise KeyError("an error that no release note mentions")
        return await original(self, prefix)

    monkeypatch.setattr(Client, "list", list_once_broken)
    async with daemon(etcd, rack) as a:
        assert await a.wait_until_registered(5.0)
    assert failed


async def test_a_member_at_a_loopback_address_among_others_is_named(etcd: Etcd, rack: str) -> None:
    async with daemon(etcd, rack) as a, EtcdRegistry(etcd.url, rack, Member("b", "http://127.0.0.1:7717")) as b:
        for each in (a, b):
            await until(each, lambda each=each: ids(each) == "ab")
        assert "node 'b' is in the ring at http://127.0.0.1:7717" in a.problem
        assert "this daemon is in the ring at http://127.0.0.1:7717" in b.problem
        assert "--advertise" in b.problem


async def test_a_wrong_password_is_named_and_never_shown(
    etcd: Etcd, rack: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with daemon(etcd.url.replace("http://", "http://me:hunter2@"), rack) as a:
        assert not await a.wait_until_registered()
    assert "authentication" in caplog.text
    assert "hunter2" not in caplog.text + repr(a)


# Keys and leases that others change ----------------------------------------------------------------------------------


@pytest.mark.fault("M4")
async def test_a_lease_revoked_under_a_living_daemon_is_replaced(etcd: Etcd, rack: str) -> None:
    async with members(etcd, rack, "ab") as (a, b):
        lease = lease_of(etcd, rack, "a")
        await asyncio.to_thread(etcd.ctl, "lease", "revoke", lease)
        await until(a, lambda: f"{a.state.lease:x}" != lease and a.registered)
        await until(b, lambda: ids(b) == "ab")
        assert lease_of(etcd, rack, "a") != lease


@pytest.mark.fault("M4")
@pytest.mark.parametrize("tampering", [("del",), ("put", "junk")])
async def test_a_daemon_s_own_key_is_rewritten_when_deleted_or_overwritten(
    etcd: Etcd, rack: str, tampering: tuple[str, ...]
) -> None:
    async with members(etcd, rack, "ab") as (a, b):
        what, *value = tampering
        before = a.state.keys[key(rack, "a")]
        await asyncio.to_thread(etcd.ctl, what, key(rack, "a"), *value)
        await until(a, lambda: a.registered and a.state.keys[key(rack, "a")] > before)
        await until(b, lambda: ids(b) == "ab")


@pytest.mark.fault("M4")
async def test_lists_replace_a_watch_that_delivers_nothing(
    etcd: Etcd, rack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(self: Client, prefix: str, from_revision: int) -> AsyncIterator[Any]:
        async def never() -> AsyncIterator[Any]:
            await asyncio.Event().wait()
            yield

        return never()

    monkeypatch.setattr(Client, "watch", silent)
    async with members(etcd, rack, "ab") as (a, _):
        async with daemon(etcd, rack, "c"):
            await until(a, lambda: ids(a) == "abc", 3 * TTL)
        await until(a, lambda: ids(a) == "ab", 3 * TTL)


@pytest.mark.fault("M4")
async def test_history_compacted_under_a_watch_changes_nothing(etcd: Etcd, rack: str) -> None:
    async with members(etcd, rack, "a") as (a,):
        await asyncio.to_thread(etcd.compact)
        async with daemon(etcd, rack, "b"):
            await until(a, lambda: ids(a) == "ab")


@pytest.mark.fault("M4")
async def test_a_watch_from_history_that_was_compacted_away_ends_in_an_error(etcd: Etcd, rack: str) -> None:
    etcd.ctl("put", key(rack, "x"), "1")
    etcd.compact()
    async with Client(EtcdEndpoint("127.0.0.1", etcd.client_port), 5.0) as client:
        changes = await client.watch(key(rack, ""), 1)
        with pytest.raises(Unavailable, match="compacted"):
            async with asyncio.timeout(5.0):
                await anext(changes)


@pytest.mark.fault("M7")
async def test_hostile_records_are_ignored_and_counted(etcd: Etcd, rack: str, tmp_path: Any) -> None:
    fat = "x" * 100_000
    junk = {"junk": "{", "fat": fat, "odd": '{"url":"ftp://x","weight":1,"session":"s"}', "a/b": "{}", "ü": "{}"}
    for name, value in junk.items():
        etcd.ctl("put", key(rack, name), value)
    async with members(etcd, rack, "ab") as (a, _):
        assert a.ignored_total == len(junk)
        await asyncio.to_thread(etcd.ctl, "put", key(rack, "junk"), "[")
        async with daemon(etcd, rack, "c"):
            await until(a, lambda: ids(a) == "abc")
        assert a.ignored_total == len(junk) + 1


@pytest.mark.fault("M7")
async def test_a_prefix_with_many_large_records_is_read_in_pages(etcd: Etcd, rack: str) -> None:
    async with Client(EtcdEndpoint("127.0.0.1", etcd.client_port), 10.0) as client:
        lease = await client.grant(60)
        for i in range(700):
            assert await client.register(key(rack, f"n{i:03}"), b"{" * (1 << 20 if 300 <= i < 307 else 10), lease, 0)
        listed = await client.list(key(rack, ""))
        await client.revoke(lease)
    assert [entry.key for entry in listed.entries] == [key(rack, f"n{i:03}") for i in range(700)]


# One name, two daemons -----------------------------------------------------------------------------------------------


@pytest.mark.fault("M8")
async def test_a_node_id_held_by_a_living_daemon_is_refused_and_named(etcd: Etcd, rack: str) -> None:
    async with members(etcd, rack, "a") as (a,):
        async with daemon(etcd, rack, "a", port=2) as second:
            with pytest.raises(Misconfigured, match=r"'a' is taken .* http://a\.test:1; .* Choose another --node-id"):
                await second.wait_until_registered()
            assert not second.registered
        assert a.registered
        assert [member.url for member in a.ring.members] == ["http://a.test:1"]


async def test_a_node_id_whose_daemon_died_is_free_once_its_lease_has_expired(etcd: Etcd, rack: str) -> None:
    etcd_lease = etcd.ctl("lease", "grant", "2").split()[1]
    record = '{"url":"http://dead:1","weight":1,"session":"dead"}'
    etcd.ctl("put", key(rack, "a"), record, f"--lease={etcd_lease}")
    async with daemon(etcd, rack, "a") as a:
        assert await a.wait_until_registered(GRANTED + 3.0)


async def test_a_daemon_that_restarts_at_its_address_takes_its_own_place_at_once(etcd: Etcd, rack: str) -> None:
    record = '{"url":"http://a.test:1","weight":1,"session":"former"}'
    etcd.ctl("put", key(rack, "a"), record)
    async with daemon(etcd, rack, "a") as a:
        assert await a.wait_until_registered(5.0)
        assert "former" not in etcd.ctl("get", key(rack, "a"))


# The loop it runs on -------------------------------------------------------------------------------------------------


def test_it_runs_on_uvloop(etcd: Etcd, rack: str) -> None:
    async def main() -> None:
        async with members(etcd, rack, "ab") as (a, b):
            assert a.ring == b.ring

    uvloop.run(main())


async def test_an_error_in_the_daemon_is_propagated_unchanged(etcd: Etcd, rack: str) -> None:
    with pytest.raises(Misconfigured, match="mine"):
        async with daemon(etcd, rack):
            raise Misconfigured("mine")


def test_the_lease_is_that_of_the_design() -> None:
    assert registry_module.TTL_SECONDS == 10.0
