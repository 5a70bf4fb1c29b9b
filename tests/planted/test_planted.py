"""The list of planted bugs is in order; and each bug is caught (``make planted``)."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.planted.bugs import BUGS
from tests.planted.plant import ROOT, Planted
from tests.planted.run import Copy

NAMES = [bug.name for bug in BUGS]


def test_there_are_enough_bugs_of_every_part_and_each_has_a_name_of_its_own() -> None:
    assert len(BUGS) >= 25
    assert len(set(NAMES)) == len(NAMES)
    assert len({(bug.file, bug.before, bug.after) for bug in BUGS}) == len(BUGS)
    assert {bug.file.split("/")[0] for bug in BUGS} == {"quiver", "cacheserver", "client"}


@pytest.mark.parametrize("bug", BUGS, ids=NAMES)
def test_a_bug_applies_exactly_once_and_its_tests_exist(bug: Planted) -> None:
    assert bug.occurrences() == 1, f"{bug.file} has changed: adapt the bug"
    assert bug.before != bug.after
    ast.parse(bug.planted())
    assert bug.caught_by
    for test in bug.caught_by:
        file, _, name = test.partition("::")
        assert re.search(rf"def {re.escape(name.partition('[')[0])}\(", (ROOT / file).read_text()), test


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    with contextlib.closing(Copy(tmp_path_factory.mktemp("planted"))) as copy:
        yield copy


@pytest.mark.planted
@pytest.mark.timeout(600)
def test_the_tests_pass_without_a_bug(sources: Copy) -> None:
    code, failures = sources.run(sorted({test for bug in BUGS for test in bug.caught_by}), first_only=False)
    assert code == 0, failures


@pytest.mark.planted
@pytest.mark.timeout(180)
@pytest.mark.parametrize("bug", BUGS, ids=NAMES)
def test_a_planted_bug_is_caught(sources: Copy, bug: Planted) -> None:
    verdict = sources.try_out(bug)
    assert verdict.caught, verdict.by


@pytest.mark.planted
@pytest.mark.timeout(180)
def test_a_bug_that_breaks_nothing_is_missed_and_so_is_one_that_cannot_be_imported(sources: Copy) -> None:
    test = ("tests/kernel/test_values.py",)
    text = '_TEXT = re.compile(r"[0-9a-f]{64}", re.ASCII)'
    harmless = Planted("harmless", "quiver/digest.py", text, f"{text}  # no bug", test)
    broken = Planted("broken", "quiver/digest.py", text, f"{text}\nimport no_such_module", test)
    assert not sources.try_out(harmless).caught
    assert not sources.try_out(broken).caught
    absent = Planted("absent", "quiver/digest.py", "no such text", "", test)
    assert not sources.try_out(absent).caught
    assert (ROOT / "quiver/digest.py").read_text().count(text) == 1, "the sources themselves are never touched"
    assert not Path(ROOT / "quiver/no_such_module.py").exists()
