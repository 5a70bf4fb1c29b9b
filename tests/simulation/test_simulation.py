"""Seeds of the simulation. A seed that fails is replayed by ``python -m tests.simulation --seed N --trace``."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.simulation.__main__ import main
from tests.simulation.scenario import KINDS, drawn
from tests.simulation.world import Outcome, simulate

pytestmark = pytest.mark.fault("M1", "M3", "M4", "M5", "M6", "E1", "E3", "O5")

FIRST, SOME, MANY = 0, 60, 1000


def run(seeds: range) -> tuple[Counter[str], Counter[str]]:
    """Return what was checked and which faults fired, over seeds that all are exact."""
    checked: Counter[str] = Counter()
    fired: Counter[str] = Counter()
    for seed in seeds:
        try:
            outcome = simulate(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        checked += outcome.checked
        fired += outcome.fired
    return checked, fired


@pytest.mark.parametrize("first", range(FIRST, SOME, 20))
def test_the_promises_hold_in_every_seed(first: int) -> None:
    checked, fired = run(range(first, first + 20))
    assert all(checked[what] > 0 for what in ("samples", "verified shards", "evictions", "leases", "epochs", "rings"))
    assert fired["kill"] > 0
    assert sum(fired.values()) > 20


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(SOME, SOME + MANY, 250))
def test_the_promises_hold_in_a_thousand_seeds(first: int) -> None:
    checked, fired = run(range(first, first + 250))
    assert not set(KINDS) - set(fired), "faults that never fired"
    assert all(checked[what] > 0 for what in ("calm", "replays", "decisions"))


def test_a_seed_is_the_same_again() -> None:
    def facts(outcome: Outcome) -> tuple[object, ...]:
        return outcome.events, outcome.virtual_seconds, outcome.checked, outcome.fired

    for seed in (3, 4, 11):
        assert facts(simulate(seed)) == facts(simulate(seed))


def test_seeds_draw_every_fault() -> None:
    kinds = {fault.kind for seed in range(300) for fault in drawn(random.Random(seed)).faults}
    assert kinds == set(KINDS)


def test_the_command_says_how_many_seeds_were_exact(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "3 of 3 exact"
    assert main(["--seed", "1", "--trace"]) == 0
    assert "seed 1: exact" in capsys.readouterr().out
