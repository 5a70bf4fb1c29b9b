"""The record of which sharing domains hold a file: with the file, never for another one, and lost only safely."""

from __future__ import annotations

import errno
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from quiver.digest import Digest
from quiver.domain import SINGLE, Domain, domain_named
from quiver.errors import OverCapacity
from quiver.store import FolderInventory, Kind, MemoryInventory, Store
from quiver.store import domains as domains_module
from quiver.store.domains import ATTRIBUTE, DOMAINS_MAX, domains_recorded
from quiver.store.inventory import file_of
from tests.support.data import make_shard

ONE, TWO = domain_named("one"), domain_named("two")
SHARDS = [make_shard([bytes([number]) * (900 + number)]) for number in range(4)]
SHARD, DATA = SHARDS[0]


def opened(root: Path, capacity_bytes: int = 1 << 20) -> Store[MemoryInventory]:
    return Store.open(root, capacity_bytes, shared=False)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store[MemoryInventory]]:
    made = opened(tmp_path / "store")
    yield made
    made.close()


def put(store: Store[Any], domain: Domain, digest: Digest = SHARD, data: bytes = DATA, *, shares: bool = True) -> bool:
    with store.reserve(Kind.SHARD, digest, len(data), (), domain) as writing:
        writing.write(data)
        return writing.commit(shares=shares)


def inode(store: Store[Any], digest: Digest = SHARD) -> int:
    return file_of(store.root, Kind.SHARD, digest).stat().st_ino


@pytest.mark.fault("S8")
def test_a_second_domain_shares_the_file_of_the_first(store: Store[MemoryInventory]) -> None:
    heard: list[tuple[Digest, bool]] = []
    store.inventory.subscribe(lambda digest, held: heard.append((digest, held)))
    assert put(store, ONE)
    before, edition = inode(store), store.inventory.edition(SHARD)
    assert not put(store, TWO)
    assert (inode(store), store.inventory.edition(SHARD)) == (before, edition)
    assert store.inventory.domains_of(Kind.SHARD, SHARD) == (ONE, TWO)
    assert store.resident_bytes() == len(DATA)
    assert not list((store.root / "tmp").iterdir())
    assert heard == [(SHARD, True)] * 2
    assert put(store, TWO), "one that a domain has is written anew, as ever"
    assert store.inventory.domains_of(Kind.SHARD, SHARD) == (ONE, TWO), "and stays the other's"
    assert not store.inventory.has(Kind.SHARD, SHARD, SINGLE)
    store.drop(Kind.SHARD, SHARD)
    assert store.inventory.domains_of(Kind.SHARD, SHARD) == ()
    assert put(store, TWO)
    assert store.inventory.domains_of(Kind.SHARD, SHARD) == (TWO,), "what was evicted is the other's no longer"


@pytest.mark.fault("S8")
def test_a_file_that_is_not_known_to_be_right_is_replaced_and_stays_everybody_s(store: Store[MemoryInventory]) -> None:
    put(store, ONE)
    before = inode(store)
    assert put(store, TWO, shares=False)
    assert inode(store) != before
    assert domains_recorded(file_of(store.root, Kind.SHARD, SHARD)) == (ONE, TWO)


@pytest.mark.fault("S8")
def test_without_tokens_nothing_is_recorded(store: Store[MemoryInventory]) -> None:
    put(store, SINGLE)
    assert ATTRIBUTE not in os.listxattr(file_of(store.root, Kind.SHARD, SHARD))
    assert store.inventory.domains_of(Kind.SHARD, SHARD) == (SINGLE,)
    assert store.inventory._domains == {kind: {} for kind in Kind}


def test_a_folder_that_processes_share_belongs_to_whoever_may_read_it(tmp_path: Path) -> None:
    shared: Store[FolderInventory] = Store.open(tmp_path / "store", 1 << 20, shared=True)
    put(shared, SINGLE)
    assert shared.inventory.domains_of(Kind.SHARD, SHARD) == (SINGLE,)
    shared.close()


@pytest.mark.fault("S8", "C4")
def test_where_a_file_system_keeps_no_attributes_the_record_lasts_as_long_as_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(os, "setxattr", refused)
    monkeypatch.setattr(domains_module, "_warned", [])
    store = opened(tmp_path / "store")
    with caplog.at_level(logging.WARNING):
        put(store, ONE)
        assert not put(store, TWO)
    assert store.inventory.domains_of(Kind.SHARD, SHARD) == (ONE, TWO)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "extended attributes" in caplog.text
    assert SHARD.hex() not in caplog.text
    store.close()
    store = opened(tmp_path / "store")
    assert not any(store.inventory.has(Kind.SHARD, SHARD, domain) for domain in (ONE, TWO))
    assert not put(store, ONE)
    assert store.inventory.has(Kind.SHARD, SHARD, ONE)
    store.close()


@pytest.mark.fault("S8")
@pytest.mark.parametrize("value", [b"x", b"x" * 17, b"x" * 16 * (DOMAINS_MAX + 1), bytes(15)])
def test_a_malformed_record_gives_the_file_to_nobody(tmp_path: Path, value: bytes) -> None:
    store = opened(tmp_path / "store")
    put(store, ONE)
    os.setxattr(file_of(store.root, Kind.SHARD, SHARD), ATTRIBUTE, value)
    store.close()
    store = opened(tmp_path / "store")
    assert store.inventory.domains_of(Kind.SHARD, SHARD) == ()
    assert store.inventory.has(Kind.SHARD, SHARD)
    assert not any(store.inventory.has(Kind.SHARD, SHARD, domain) for domain in (ONE, SINGLE))
    store.close()


@pytest.mark.fault("S8")
def test_a_file_has_so_many_domains_and_the_oldest_loses_it(store: Store[MemoryInventory]) -> None:
    domains = [domain_named(f"d{number}") for number in range(DOMAINS_MAX + 3)]
    for domain in domains:
        put(store, domain)
    assert store.inventory.domains_of(Kind.SHARD, SHARD) == tuple(domains[3:])
    assert domains_recorded(file_of(store.root, Kind.SHARD, SHARD)) == tuple(domains[3:])


def test_the_memory_of_records_goes_with_the_files(store: Store[MemoryInventory]) -> None:
    for digest, data in SHARDS:
        put(store, ONE, digest, data)
    assert store.inventory.digests(Kind.SHARD, ONE).shape == (4, 32)
    assert store.inventory.digests(Kind.SHARD, TWO).shape == (0, 32)
    for digest, _ in SHARDS[:2]:
        store.drop(Kind.SHARD, digest)
    store.quarantine(Kind.SHARD, SHARDS[2][0])
    assert set(store.inventory._domains[Kind.SHARD]) == {SHARDS[3][0]}
    store.drop(Kind.SHARD, SHARDS[3][0])
    assert store.inventory._held_in == {kind: {} for kind in Kind}


@pytest.mark.fault("S8", "C1")
def test_the_store_knows_after_any_history_and_restart_what_each_domain_holds(tmp_path: Path) -> None:
    domains = st.sampled_from([SINGLE, ONE, TWO])
    numbers = st.integers(0, len(SHARDS) - 1)

    class Model(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            self.root = tmp_path / os.urandom(8).hex()
            self.store = opened(self.root, 3_000)  # three fit
            self.held: dict[Digest, set[Domain]] = {}

        @rule(domain=domains, number=numbers, shares=st.booleans())
        def put(self, domain: Domain, number: int, shares: bool) -> None:
            digest, data = SHARDS[number]
            try:
                put(self.store, domain, digest, data, shares=shares)
                self.held.setdefault(digest, set()).add(domain)
            except OverCapacity:
                assert len(self.held) == 3

        @rule(number=numbers)
        def drop(self, number: int) -> None:
            self.store.drop(Kind.SHARD, SHARDS[number][0])
            self.held.pop(SHARDS[number][0], None)

        @rule()
        def restart(self) -> None:
            self.store.close()
            self.store = opened(self.root, 3_000)

        @invariant()
        def agrees(self) -> None:
            if not hasattr(self, "store"):
                return
            has = self.store.inventory.has
            for digest, _ in SHARDS:
                found = {domain for domain in (SINGLE, ONE, TWO) if has(Kind.SHARD, digest, domain)}
                assert found == self.held.get(digest, set())
            assert self.store.resident_bytes() == sum(len(data) for digest, data in SHARDS if digest in self.held)

        def teardown(self) -> None:
            if hasattr(self, "store"):
                self.store.close()

    few = settings(max_examples=12, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Model, settings=few)


# -- killed in between -------------------------------------------------------------------------------------------------

CALLS: dict[str, tuple[object, str]] = {
    "record": (os, "setxattr"),
    "sync": (os, "fsync"),
    "rename": (Path, "replace"),
    "remove": (Path, "unlink"),
}


def killed(root: Path, call: str, nth: int, is_after: bool, shares: bool) -> None:
    """In a child: bring a shard to a second domain, and die at the nth call."""
    of, name = CALLS[call]
    original: Callable[..., Any] = getattr(of, name)
    calls = 0

    def deadly(*args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth and not is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **more)
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    store = opened(root)
    setattr(of, name, deadly)
    put(store, TWO, shares=shares)
    os._exit(7)


@pytest.mark.fault("S8", "C1")
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("call", "nth"), [("record", 1), ("record", 2), ("sync", 1), ("rename", 1), ("remove", 1)])
@pytest.mark.parametrize("way", ["new", "shared", "replaced"])
def test_a_daemon_killed_while_a_domain_gains_a_shard_leaves_a_right_store(
    tmp_path: Path, way: str, call: str, nth: int, is_after: bool
) -> None:
    root = tmp_path / "store"
    store = opened(root)
    if way != "new":
        put(store, ONE)
    store.close()
    child = os.fork()
    if not child:
        try:
            killed(root, call, nth, is_after, way != "replaced")
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    happens = {"record": nth == 1 or way != "new", "sync": True, "rename": way != "shared", "remove": way == "shared"}
    assert code == (-signal.SIGKILL if happens[call] else 7), "the fault fired"
    store = opened(root)
    assert not list((root / "tmp").iterdir())
    had = {"new": (), "shared": (ONE,), "replaced": (ONE,)}[way]
    assert store.inventory.domains_of(Kind.SHARD, SHARD) in (had, (*had, TWO))
    if store.inventory.has(Kind.SHARD, SHARD):
        store.check(SHARD)
        assert store.resident_bytes() == len(DATA)
    put(store, TWO)
    assert store.inventory.domains_of(Kind.SHARD, SHARD) == (*had, TWO)
    store.close()
