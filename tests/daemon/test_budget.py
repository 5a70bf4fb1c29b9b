"""What one client address may cost (``quiver_cacheserver.budget``), without sockets and without a clock."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.errors import OverCapacity
from quiver_cacheserver.budget import HELD_MAX, Budgets, Cost, RefillRate, Resource, address_of
from quiver_cacheserver.serving.turns import Places

UPLOADS, WORK = Resource.UPLOADS, Cost.WORK_SECONDS


def taken(budgets: Budgets, address: str, what: Resource = UPLOADS) -> int:
    """Take as much as the address gets; return how much it holds."""
    while budgets.hold(address, what):
        pass
    return budgets.held(address, what)


@pytest.mark.parametrize("what", list(Resource))
def test_one_address_gets_three_quarters_and_a_newcomer_finds_a_place(what: Resource) -> None:
    total = 16
    budgets = Budgets({**HELD_MAX, what: total})
    assert taken(budgets, "10.0.0.1", what) == total * 3 // 4
    assert budgets.hold("10.0.0.2", what)


def test_greedy_addresses_come_to_equal_parts_and_leave_a_place() -> None:
    budgets = Budgets({**HELD_MAX, UPLOADS: 256})
    greedy = [f"10.0.0.{number}" for number in range(8)]
    taken(budgets, greedy[0])
    for _ in range(20):  # what is held ends, and all ask again
        for address in greedy:
            for _ in range(budgets.held(address, UPLOADS) // 2):
                budgets.release(address, UPLOADS)
        while sum(budgets.hold(address, UPLOADS) for address in greedy):
            pass
    for address in greedy:
        assert 28 <= budgets.held(address, UPLOADS) <= 36  # 3/25 of 256 are 31
    assert budgets.hold("10.0.1.1", UPLOADS)


def test_thirty_addresses_that_each_hold_a_little_use_all_of_it() -> None:
    budgets = Budgets({**HELD_MAX, UPLOADS: 128})
    for _ in range(4):
        for number in range(30):
            assert budgets.hold(f"10.0.0.{number}", UPLOADS)
    assert budgets.used[UPLOADS] == 120


def test_what_is_released_is_had_again_and_refusals_are_counted() -> None:
    budgets = Budgets({**HELD_MAX, UPLOADS: 4})
    held = taken(budgets, "a")
    assert budgets.refused[UPLOADS] == 1
    budgets.release("a", UPLOADS)
    with budgets.holding("a", UPLOADS):
        assert budgets.held("a", UPLOADS) == held
        with pytest.raises(OverCapacity) as refused, budgets.holding("a", UPLOADS):
            pass
    assert refused.value.retry_after_seconds > 0
    assert budgets.held("a", UPLOADS) == held - 1


def test_an_amount_that_would_leave_others_too_little_is_refused() -> None:
    budgets = Budgets({**HELD_MAX, Resource.UPLOAD_BYTES: 1000})
    assert not budgets.hold("a", Resource.UPLOAD_BYTES, 760)
    assert budgets.hold("a", Resource.UPLOAD_BYTES, 740)
    assert not budgets.hold("a", Resource.UPLOAD_BYTES, 20)
    assert budgets.hold("b", Resource.UPLOAD_BYTES, 190)


def test_a_cost_leads_into_debt_which_time_works_off() -> None:
    budgets = Budgets(rates={WORK: RefillRate(0.5, 2.0)})
    assert budgets.spend("a", WORK, 5.0, now=100.0), "what it takes is known only afterwards"
    assert not budgets.spend("a", WORK, 1.0, now=101.0)
    assert budgets.refused[WORK] == 1
    assert budgets.spend("b", WORK, 1.0, now=101.0), "another address has its own"
    assert budgets.refusal(WORK, "a", now=101.0).retry_after_seconds == pytest.approx(2.5 / 0.5 + 1)
    assert budgets.left("a", WORK, now=107.0) == pytest.approx(0.5)
    assert budgets.spend("a", WORK, 1.0, now=107.0)
    assert budgets.left("a", WORK, now=1e6) == 2.0


def test_debt_is_bounded_so_that_it_ends() -> None:
    budgets = Budgets(rates={WORK: RefillRate(1.0, 10.0)})
    budgets.charge("a", WORK, 1e9, now=0.0)
    assert budgets.left("a", WORK, now=11.0) == pytest.approx(1.0)


def test_addresses_are_forgotten_unless_they_hold_something() -> None:
    budgets = Budgets({**HELD_MAX, UPLOADS: 1000}, addresses_max=8)
    for number in range(4):
        assert budgets.hold(f"holds {number}", UPLOADS)
    for number in range(100):
        budgets.left(f"passes {number}", WORK, now=0.0)
    assert len(budgets) == 8
    for number in range(4):
        budgets.release(f"holds {number}", UPLOADS)
    assert budgets.used[UPLOADS] == 0
    for number in range(100):
        budgets.left(f"passes again {number}", WORK, now=0.0)
    assert len(budgets) == 8


async def test_places_are_given_to_addresses_in_turn() -> None:
    places = Places(Budgets({**HELD_MAX, UPLOADS: 4}), UPLOADS)
    for _ in range(3):
        await places.take("greedy", 1.0)
    order: list[str] = []

    async def take(client: str) -> None:
        await places.take(client, 20.0)
        order.append(client)

    async with asyncio.TaskGroup() as tasks:
        for client in ("greedy", "greedy", "honest", "greedy", "honest"):
            tasks.create_task(take(client))
        await asyncio.sleep(0)
        for _ in range(6):
            for _ in range(5):
                await asyncio.sleep(0)
            await asyncio.to_thread(places.end, "greedy" if places.budgets.held("greedy", UPLOADS) else "honest")
    assert order[0] == "honest", "there was a place for it at once"
    assert order.count("greedy") == 3
    taken(places.budgets, "greedy")
    with pytest.raises(OverCapacity):
        await places.take("greedy", 0.01)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 9), st.booleans()), max_size=200))
def test_no_more_is_held_than_there_is_and_nobody_loses_account(steps: list[tuple[str, int, bool]]) -> None:
    budgets = Budgets({**HELD_MAX, UPLOADS: 40}, addresses_max=2)
    held: list[tuple[str, int]] = []
    for address, amount, takes in steps:
        if takes and budgets.hold(address, UPLOADS, amount):
            held.append((address, amount))
        elif not takes and held:
            budgets.release(held[0][0], UPLOADS, held.pop(0)[1])
        mine: Counter[str] = Counter()
        for holder, part in held:
            mine[holder] += part
        assert budgets.used[UPLOADS] == sum(mine.values()) <= 40
        assert all(budgets.held(holder, UPLOADS) == count for holder, count in mine.items())


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("10.1.2.3", 4711), "10.1.2.3"),
        (("::ffff:10.1.2.3", 4711, 0, 0), "10.1.2.3"),
        (("2001:db8:1:2:3:4:5:6", 4711, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 4711, 0, 2), "fe80::/64"),
        ("", "local"),
        (None, "local"),
    ],
)
def test_an_address_is_one_machine_as_far_as_can_be_seen(peer: object, address: str) -> None:
    assert address_of(peer) == address


async def test_a_place_that_is_given_as_the_time_is_up_is_not_lost() -> None:
    places = Places(Budgets({**HELD_MAX, UPLOADS: 4}), UPLOADS)
    for _ in range(3):
        await places.take("a", 1.0)
    late = asyncio.create_task(places.take("a", 0.02))
    await asyncio.sleep(0)
    time.sleep(0.05)  # noqa: ASYNC251 - the loop is busy while the time runs out, and the place comes back
    places.end("a")
    places._wake()
    with contextlib.suppress(OverCapacity):
        await late
        places.end("a")
    places.end("a")
    places.end("a")
    assert places.budgets.held("a", UPLOADS) == 0
