"""Datasets of several sharing domains in one policy: they share room and turns, and know nothing of one another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.digest import Digest
from quiver.lookup import as_rows
from quiver.residency import Decision, Needs, Recipe, Shelf, Situation, StoredFile, decide
from quiver.residency.needs import named
from tests.kernel.test_needs_policy import FAST, A, report, shard, shards

KEYS = [None, *(np.frombuffer(bytes([7 * number]) * 32, np.uint8) for number in (1, 2))]


def name(domain: int, digest: Digest) -> Digest:
    return Digest(named(as_rows([digest]), KEYS[domain]).tobytes())


def board(domains: Iterable[int], held: dict[int, Iterable[int]], count: int = 3) -> Needs:
    """One dataset of ``count`` shards of a byte, in several domains; ``held``: what each of them holds."""
    needs = Needs()
    for domain in domains:
        here, key = np.zeros(count, bool), KEYS[domain]
        here[list(held.get(domain, ()))] = True
        names = named(shards(range(count)), key)
        grown = needs.grown(names, key)
        needs.add_dataset(name(domain, A), names, np.ones(count), here, np.ones(count, bool), grown)
    return needs


def tell(needs: Needs, domain: int, consumer: int, left: list[int], **more: Any) -> None:
    assert needs.report(name(domain, A), report(consumer, left, **more), 0.0)


def shelf_of(needs: Needs, files: Iterable[int]) -> Shelf:
    return Shelf.of([StoredFile(shard(at), 1, 0.0) for at in files], 100.0, needs.needed_of)


@pytest.mark.fault("S8")
def test_a_domain_sees_what_it_holds_and_who_of_it_needs_what() -> None:
    needs = board([0, 1, 2], {0: [0, 1], 1: [1]})
    tell(needs, 0, 1, [255, 255, 255])
    tell(needs, 0, 2, [255, 0, 0])
    tell(needs, 1, 3, [255, 255, 255])
    tell(needs, 2, 4, [255, 255, 255])
    seen = [needs.seen_by(consumer.to_bytes(16, "big")).tolist() for consumer in (1, 3, 4)]
    assert seen == [[2, 1, 0], [0, 1, 0], [0, 0, 0]]
    needs.arrived(name(2, shard(2)))
    assert needs.seen_by((4).to_bytes(16, "big")).tolist() == [0, 0, 1]
    assert needs.seen_by((1).to_bytes(16, "big")).tolist() == [2, 1, 0]
    assert needs.manifests == {A}


@pytest.mark.fault("S8")
def test_what_one_domain_holds_is_fetched_for_another_that_needs_it() -> None:
    needs = board([0, 1], {0: [0, 1, 2]})
    tell(needs, 1, 1, [255, 255, 255])
    decisions = decide(needs, Situation(now=0.0, free_bytes=9.0, fetches_max=9, origin=FAST))
    assert {decision.dataset for decision in decisions} == {name(1, A)}
    assert {name(1, decision.shard) for decision in decisions} == set(map(shard, range(3)))


@pytest.mark.fault("S8")
def test_no_file_is_evicted_that_any_domain_needs_and_an_evicted_one_is_gone_for_all() -> None:
    needs = board([0, 1], {0: [0, 1], 1: [0, 1]})
    tell(needs, 0, 1, [255, 0, 0], ahead_bytes=9.0)
    tell(needs, 1, 2, [0, 0, 255])
    assert needs.needed_of(shards(range(4))).tolist() == [1, 0, 0, -1]
    shelf = shelf_of(needs, [0, 1])
    situation = Situation(now=0.0, free_bytes=0.0, fetches_max=1, origin=FAST, shelf=lambda: shelf)
    (decision,) = decide(needs, situation)
    assert (name(1, decision.shard), decision.evict) == (shard(2), (shard(1),))
    needs.commit(decision)
    assert needs.present().tolist() == [True, False, False, True, False, False]
    needs.end(decision.recipe)
    assert needs.present().tolist() == [True, True, False, True, True, False]


@pytest.mark.fault("S8")
def test_a_domain_neither_pins_nor_frees_what_it_only_names() -> None:
    needs = board([0, 1], {0: [0]})
    tell(needs, 1, 1, [255, 0, 0])
    tell(needs, 0, 2, [0, 0, 0])
    assert needs.needed_of(shards([0])).tolist() == [0], "the other one's need does not keep it"
    alone = board([1], {})
    tell(alone, 1, 1, [0, 0, 0])
    assert alone.needed_of(shards([0])).tolist() == [-1], "and its word that nobody needs it does not count"
    alone.arrived(name(1, shard(0)))
    assert alone.needed_of(shards([0])).tolist() == [0]


@pytest.mark.fault("S8")
def test_of_the_needed_files_the_one_goes_that_fewest_need_in_all_domains_together() -> None:
    needs = board([0, 1, 2], {0: [0, 1], 1: [0, 1]})
    tell(needs, 0, 1, [255, 255, 0], ahead_bytes=9.0)
    tell(needs, 1, 2, [255, 0, 0], ahead_bytes=9.0)
    tell(needs, 2, 3, [0, 0, 255])
    assert needs.counts_of_files().tolist() == [2, 1, 1] * 3
    shelf = shelf_of(needs, [0, 1])
    (decision,) = decide(needs, Situation(now=0.0, free_bytes=0.0, fetches_max=1, origin=FAST, shelf=lambda: shelf))
    assert decision.forced == decision.evict == (shard(1),), "a file, by its digest"
    assert decision.recipe == Recipe(name(2, shard(2)), name(2, A))


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=12))
@settings(max_examples=50, deadline=None)
def test_domains_come_and_go_and_the_others_stay_as_they_are(steps: list[tuple[int, bool]]) -> None:
    needs, here = Needs(), dict[int, bool]()
    for domain, leaves in steps:
        names = named(shards(range(3)), KEYS[domain])
        if leaves:
            needs.leave(domain.to_bytes(16, "big"))
            needs.forget_unused()
            here.pop(domain, None)
        else:
            if domain not in here:
                held, mine = np.array([domain == 0, domain == 1, domain == 2]), np.ones(3, bool)
                needs.add_dataset(name(domain, A), names, np.ones(3), held, mine, needs.grown(names, KEYS[domain]))
            tell(needs, domain, domain, [255, 0, 0])
            here[domain] = True
        assert needs.manifests == ({A} if here else set())
        for each in here:
            seen = needs.seen_by(each.to_bytes(16, "big")).tolist()
            assert seen == [int(each == at) for at in range(3)]
            slots = [needs.shards[name(each, shard(at))] for at in range(3)]
            assert [needs.file_of(slot) for slot in slots] == [shard(at) for at in range(3)]
        assert needs.needed_of(shards([0, 1])).tolist() == said(here)


def said(here: dict[int, bool]) -> list[int]:
    """Return whether the first and second shard are needed: all need the first one, and each holds its own."""
    first = 1 if 0 in here else -1
    return [first, 0 if 0 in here or 1 in here else -1]


def test_a_decision_s_bytes_are_counted_once_whatever_its_file_is_called() -> None:
    needs = board([0, 1], {0: [0], 1: [0]})
    tell(needs, 0, 1, [255, 255, 255])
    needs.commit(Decision(shard(1), A, 1.0, (shard(0),)))
    assert needs.slots_of_files([shard(0)]).tolist() == [0, 3]
