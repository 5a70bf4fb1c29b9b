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


@given(held, st.integers(0, 500), st.sets(st.integers(0, 19)))
def test_only_what_is_idle_and_unused_makes_way_and_no_more_of_it_than_is_wanted(
    items: list[Held], free_bytes: int, used: set[int]
) -> None:
    busy = {item.digest for at, item in enumerate(items) if at in used}
    free = [item for item in items if item.digest not in busy and NOW - item.used >= IDLE_SECONDS]
    victims = choose_victims(items, free_bytes, busy.__contains__, NOW)
    if victims is None:
        assert sum(item.size_bytes for item in free) < free_bytes
        return
    assert set(victims) <= set(free)
    assert sum(item.size_bytes for item in victims) >= free_bytes
    assert not victims or sum(item.size_bytes for item in victims[:-1]) < free_bytes
    spared = [item for item in free if item not in victims]
    assert all(victim.used <= item.used for victim in victims for item in spared), "idle the longest goes first"
