"""What makes way when room is wanted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quiver.digest import Digest
from quiver.residency import IDLE_SECONDS, Held, choose_victims

NOW = 10_000.0
held = st.lists(
    st.builds(Held, st.binary(min_size=32, max_size=32).map(Digest), st.integers(1, 100), st.floats(0, NOW)),
    max_size=20,
    unique_by=lambda item: item.digest,
)


@given(held, st.integers(0, 500), st.lists(st.sampled_from([True, False, None]), min_size=20, max_size=20))
def test_only_what_nobody_needs_makes_way_and_no_more_of_it_than_is_wanted(
    items: list[Held], free_bytes: int, said: list[bool | None]
) -> None:
    need = {item.digest: said[at] for at, item in enumerate(items)}
    free = [
        item
        for item in items
        if need[item.digest] is False or (need[item.digest] is None and NOW - item.used >= IDLE_SECONDS)
    ]
    victims = choose_victims(items, free_bytes, need.__getitem__, NOW)
    if victims is None:
        assert sum(item.size_bytes for item in free) < free_bytes
        return
    assert set(victims) <= set(free)
    assert sum(item.size_bytes for item in victims) >= free_bytes
    assert not victims or sum(item.size_bytes for item in victims[:-1]) < free_bytes
    spared = [item for item in free if item not in victims]
    assert all(victim.used <= item.used for victim in victims for item in spared), "idle the longest goes first"
