"""Every parser takes any bytes: a corpus and a few mutations of it always, more with the marker ``fuzz``."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz import guided, network
from tests.fuzz.mutate import Mutator
from tests.fuzz.run import HANG_SECONDS, Outcome, all_targets, run_apart, try_messages
from tests.fuzz.target import CORPUS, MIB, Target, accepts

SECONDS = float(os.environ.get("QUIVER_FUZZ_SECONDS", "60"))  # for each target, of the tests with the marker
SEED = int(os.environ.get("QUIVER_FUZZ_SEED", "1"))
TARGETS = {target.name: target for target in all_targets()}


def findings(outcome: Outcome) -> str:
    return "\n".join(f"{why}\n  {data[:2000]}" for why, data in outcome.findings)


@pytest.mark.fault("S7", "M7", "N1")
@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_takes_any_bytes(name: str) -> None:
    corpus = len(TARGETS[name].corpus())
    outcome = try_messages(TARGETS[name], SEED, messages=corpus + 5_000, seconds=0.15)
    assert not outcome.findings, findings(outcome)
    assert outcome.messages >= corpus


@pytest.mark.parametrize("name", TARGETS)
def test_valid_messages_are_accepted_so_that_mutations_of_them_go_deep(name: str) -> None:
    target = TARGETS[name]
    assert any(target.fuzz_one(seed) for seed in target.seeds())


def test_the_corpus_is_of_targets_that_exist() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} <= set(TARGETS)


# -- the harness itself -----------------------------------------------------------------------------------------------


def crashes(data: bytes) -> None:
    if len(data) > 30:
        raise KeyError("a parser's mistake")


def grows(data: bytes) -> None:
    with mmap.mmap(-1, (len(data) % 16 + 16) << 20) as fresh:  # malloc might reuse what the process has already
        fresh.write(bytes(len(fresh)))


def leaks(data: bytes) -> None:
    os.open(os.devnull, os.O_RDONLY)


@pytest.mark.parametrize(("parse", "finds"), [(crashes, "crash"), (grows, "memory"), (leaks, "descriptors")])
def test_the_harness_finds_what_it_looks_for(parse: Callable[[bytes], None], finds: str) -> None:
    before = {*Path("/proc/self/fd").iterdir()}
    target = Target("t", accepts(parse), lambda: [b"x" * 20], memory_bytes_max=8 * MIB)
    outcome = try_messages(target, SEED, messages=64)
    for fd in {*Path("/proc/self/fd").iterdir()} - before:
        if fd.exists() and os.path.realpath(fd) == os.devnull:
            os.close(int(fd.name))
    assert len(outcome.findings) == 1
    assert finds in outcome.findings[0][0]


def test_a_seed_replays_a_run() -> None:
    one, other = (Mutator([b"a valid message", b"17"], 5, 4096) for _ in range(2))
    assert [one.next() for _ in range(500)] == [other.next() for _ in range(500)]


def test_a_slow_message_is_a_finding() -> None:
    def slow(data: bytes) -> None:
        sum(range(3_000_000))

    outcome = try_messages(Target("t", accepts(slow), lambda: [b"x"], seconds_max=0.001), SEED, messages=5)
    assert [why.split(":")[0] for why, _ in outcome.findings] == ["slow"]


# -- at length --------------------------------------------------------------------------------------------------------


@pytest.mark.fuzz
@pytest.mark.timeout(SECONDS + 5 * HANG_SECONDS)
@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_takes_any_bytes_for_a_minute(name: str, tmp_path: Path) -> None:
    """Half of the time by mutation, half of it guided by coverage where atheris is installed."""
    is_guided = guided.is_installed()
    outcomes = [run_apart(name, SEED, seconds=SECONDS / 2 if is_guided else SECONDS)]
    if is_guided:
        outcomes.append(guided.run(name, SECONDS / 2, tmp_path))
    for outcome in outcomes:
        assert not outcome.findings, findings(outcome)
        assert outcome.messages > 0


@pytest.mark.fuzz
@pytest.mark.fault("S5", "S4")
@pytest.mark.timeout(SECONDS + 5 * HANG_SECONDS)
def test_a_daemon_takes_any_bytes_for_a_minute() -> None:
    outcome = network.run(SEED, SECONDS)
    assert not outcome.findings, findings(outcome)
