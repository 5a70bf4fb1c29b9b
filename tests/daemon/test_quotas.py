"""Quota classes: the share that the operator gives the tenants of a class."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quiver.domain import domain_named
from quiver.errors import Misconfigured
from quiver.peer import PeerClient
from quiver.token_source import TokenSource
from quiver.transport.connection import Connection, Endpoint
from quiver.transport.liveness import PATIENT
from quiver.transport.stream import NotUpgraded, open_stream
from quiver.wire import RANGE, ReadRequest
from quiver_cacheserver.access.caller import account_of
from quiver_cacheserver.access.control import Access
from quiver_cacheserver.access.keys import PublicKeys
from quiver_cacheserver.access.quotas import Quotas
from quiver_cacheserver.access.tokens import Tokens
from quiver_cacheserver.budget import Budgets, Cost, Resource
from quiver_cacheserver.node import Node
from tests.support.data import make_shard
from tests.support.inside import in_process, url_of
from tests.support.tokens import Signer

QUOTAS = Quotas.parse(["batch=0.25", "urgent=4"])


def greedy(budgets: Budgets, accounts: list[str]) -> list[int]:
    """Let accounts take all they can, again and again as what they hold ends; return what each holds then."""
    for _ in range(1000):
        for account in accounts:
            if held := budgets.held(account, Resource.READS):
                budgets.release(account, Resource.READS, max(held // 200, 1))
        while sum(budgets.hold(account, Resource.READS) for account in accounts):
            pass
    return [budgets.held(account, Resource.READS) for account in accounts]


def test_an_account_has_the_weight_of_its_class() -> None:
    assert QUOTAS.weight_of(account_of("vision", "batch")) == 0.25
    assert QUOTAS.weight_of(account_of("vision", "urgent")) == 4
    for other in (account_of("vision", ""), account_of("vision", "unknown"), "192.0.2.1", "user 0", "batch", ""):
        assert QUOTAS.weight_of(other) == 1


def test_busy_tenants_share_in_proportion_to_their_weights() -> None:
    budgets = Budgets({Resource.READS: 4096}, weight_of=QUOTAS.weight_of)
    batch, usual, urgent = greedy(budgets, [account_of("a", "batch"), account_of("b", ""), account_of("c", "urgent")])
    assert usual / batch == pytest.approx(4, rel=0.05)
    assert urgent / usual == pytest.approx(4, rel=0.05)
    assert budgets.hold(account_of("d", ""), Resource.READS), "and there is room for the next one"


def test_an_account_alone_leaves_room_whatever_its_weight() -> None:
    for quota, share in (("batch", 0.75 / 1.75), ("", 0.75), ("urgent", 12 / 13)):
        budgets = Budgets({Resource.READS: 4096}, weight_of=QUOTAS.weight_of)
        assert greedy(budgets, [account_of("a", quota)])[0] == pytest.approx(4096 * share, rel=0.01)


def test_what_is_spent_is_regained_in_proportion_to_the_weight() -> None:
    budgets = Budgets(weight_of=QUOTAS.weight_of)
    for quota, weight in (("batch", 0.25), ("", 1.0), ("urgent", 4.0)):
        account = account_of("a", quota)
        burst = budgets.left(account, Cost.WORK_SECONDS, 0.0)
        assert burst == weight * budgets.rates[Cost.WORK_SECONDS].burst
        assert budgets.spend(account, Cost.WORK_SECONDS, burst, 0.0)
        assert not budgets.spend(account, Cost.WORK_SECONDS, 1.0, 0.0)
        assert budgets.left(account, Cost.WORK_SECONDS, 1.0) == pytest.approx(weight)


@pytest.mark.parametrize("setting", ["batch", "batch=", "=1", "a b=1", "batch=0", "batch=-1", "batch=nan", "batch=1e9"])
def test_a_wrong_quota_is_misconfigured(setting: str) -> None:
    with pytest.raises(Misconfigured, match="--quota"):
        Quotas.parse([setting])


@contextlib.contextmanager
def streams_of(url: str, token: str) -> Iterator[list[Connection]]:
    """Open streams until the daemon refuses one."""
    endpoint, opened = Endpoint(url, PATIENT, token=TokenSource(token)), []
    try:
        with contextlib.suppress(NotUpgraded):
            while True:
                opened.append(open_stream(endpoint))
        yield opened
    finally:
        for connection in opened:
            connection.close()


def test_a_tenant_that_takes_all_it_may_leaves_the_others_theirs(tmp_path: Path) -> None:
    signer = Signer()
    signer.publish(tmp_path / "keys")
    shard, data = make_shard([b"sample"])
    shared = domain_named("shared")

    late_token = signer.token("late", domain="shared")

    def made(node: Node) -> None:
        node.access = Access(Tokens(PublicKeys(tmp_path / "keys"), "r"))
        node.budgets.weight_of = QUOTAS.weight_of

    with (
        in_process(tmp_path, {shard: data}, held_max={Resource.STREAMS: 40}, made=made, domain=shared) as address,
        streams_of(url_of(address), signer.token("greedy", quota="batch")) as batch,
        streams_of(url_of(address), signer.token("usual")) as usual,
        contextlib.closing(PeerClient(url_of(address), token=TokenSource(late_token))) as late,
    ):
        assert len(batch) == pytest.approx(40 * 0.75 / 1.75, abs=1)
        assert len(usual) > len(batch)  # of what was left: both hosts are one address
        ranges = np.zeros(1, RANGE)
        ranges["length"] = 1
        began = time.monotonic()
        assert not late.read(ReadRequest(None, (shard,), ranges))[0].any()
        assert late._streams.idle.kept, "the third tenant has a stream, too"
        assert time.monotonic() - began < 20
