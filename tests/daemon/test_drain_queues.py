"""What is handed over to whom: every item ends once, whatever receivers say and whichever are given up."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quiver_cacheserver.draining.queues import Queues, by_receiver

NAMES = "abc"


class Handover(RuleBasedStateMachine):
    """Receivers that take, refuse and vanish in any order."""

    @initialize(candidates=st.lists(st.lists(st.sampled_from(NAMES), unique=True), max_size=8))
    def begin(self, candidates: list[list[str]]) -> None:
        self.candidates = candidates
        self.queues = Queues(candidates)
        self.out: dict[int, str] = {}
        self.asked: list[list[str]] = [[] for _ in candidates]
        self.ended: set[int] = set()
        self.dropped: set[str] = set()

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 3))
    def take(self, name: str, count: int) -> None:
        if name not in self.queues.receivers:
            return
        taken = self.queues.take(name, lambda before, _: len(before) < count)
        assert taken == sorted(taken), "the most needed first"
        for item in taken:
            assert item not in self.out
            assert item not in self.ended
            assert name in self.candidates[item]
            self.out[item] = name
            if not self.asked[item] or self.asked[item][-1] != name:
                self.asked[item].append(name)

    @rule(data=st.data(), outcome=st.sampled_from(["held", "full", "failed", "again", "gone"]))
    def answer(self, data: st.DataObject, outcome: str) -> None:
        if not self.out:
            return
        item = data.draw(st.sampled_from(sorted(self.out)))
        name = self.out.pop(item)
        if outcome == "held":
            self.queues.end(item)
            self.ended.add(item)
        elif outcome == "gone":
            self.queues.forget(item)
        elif outcome == "again" and name not in self.dropped:
            self.queues.again(name, [item])
        else:
            self.queues.refuse(item, full=outcome == "full")

    @rule(name=st.sampled_from(NAMES))
    def drop(self, name: str) -> None:
        if name in self.queues.receivers:
            self.dropped.add(name)
            self.queues.drop(name)

    @invariant()
    def what_has_not_ended_is_counted(self) -> None:
        if not hasattr(self, "queues"):
            return
        over = self.ended | self.queues.refused | self.queues.failed | self.queues.gone
        assert self.queues.left == len(self.candidates) - len(over)
        assert not self.ended & (self.queues.refused | self.queues.failed | self.queues.gone)
        for asked, candidates in zip(self.asked, self.candidates, strict=True):
            assert asked == [name for name in candidates if name in asked], "in the order of the ring"


TestHandover = Handover.TestCase
TestHandover.settings = settings(max_examples=30, stateful_step_count=20)


def test_what_a_full_receiver_refuses_goes_to_the_next_one_and_ends_as_refused_after_the_last() -> None:
    queues = Queues([["a", "b"], ["a"]])
    assert queues.take("a", lambda *_: True) == [0, 1]
    queues.refuse(0, full=True)
    queues.refuse(1, full=False)
    assert (queues.refused, queues.failed, queues.left) == (set(), {1}, 1)
    assert queues.take("b", lambda *_: True) == [0]
    assert not queues.has_other([0])
    queues.refuse(0, full=False)
    assert (queues.refused, queues.left) == ({0}, 0)


def test_the_items_of_each_receiver_are_found_in_one_pass() -> None:
    candidates = iter([iter(["a", "b"]), iter([]), iter(["c", "a"]), iter(["b"])])  # which can be read once
    assert by_receiver(candidates) == {"a": [0, 2], "b": [0, 3], "c": [2]}
