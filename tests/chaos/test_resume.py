"""Jobs killed and resumed at random points: ``python -m tests.chaos.resume`` as tests."""

from __future__ import annotations

import pytest

from quiver_client.loader.epoch import Epoch
from tests.chaos.resume import attempt, dataset_in, main
from tests.support.data import Files

pytestmark = pytest.mark.fault("E1")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return dataset_in(tmp_path_factory.mktemp("small"))


def test_jobs_killed_at_any_batch_resume_exactly(small: Files) -> None:
    counts = attempt(small, 12, seed=1, in_workers=0.0, by_signal=0.1)
    assert counts.exact == 12
    assert counts.kinds["merged"] > 0


def test_jobs_killed_by_sigkill_resume_exactly(small: Files) -> None:
    counts = attempt(small, 5, seed=4, in_workers=0.0, by_signal=1.0)
    assert counts.exact == 5
    assert counts.kinds["SIGKILL"] > 0


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [11, 12])
def test_a_hundred_kills_and_resumes_are_exact(small: Files, seed: int) -> None:
    counts = attempt(small, 100, seed)
    assert counts.exact == 100
    assert all(counts.kinds[kind] > 0 for kind in ("SIGKILL", "merged", "ledger replayed", "0 workers"))
    assert counts.kinds["1 workers"] + counts.kinds["2 workers"] > 0


def test_a_loader_that_counts_what_was_prefetched_is_noticed(
    small: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = Epoch.draw

    def drawn(self: Epoch, entries: object) -> object:
        self.consumed[self._entries[entries]] = True
        return draw(self, entries)  # type: ignore[arg-type]

    monkeypatch.setattr(Epoch, "draw", drawn)
    counts = attempt(small, 10, seed=2, in_workers=0.0, by_signal=0.0)
    assert counts.exact < counts.points
    assert "never" in capsys.readouterr().out


def test_the_command_says_how_many_points_were_exact(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--points", "2", "--seed", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 of 2 exact"
