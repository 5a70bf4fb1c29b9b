"""The poller: a channel has one owner, idle ones cost no thread, and no descriptor is closed but once."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path

import pytest

from quiver_cacheserver.budget import Budgets, Resource
from quiver_cacheserver.serving.poller import AGAIN, ENDED, PARKED, READABLE, WRITABLE, Channel, Poller
from tests.support.waiting import until

made: list[Fake] = []


class Fake(Channel):
    """Serves by a function, and notes who serves it."""

    __slots__ = ("ends", "other", "served", "serving", "work")

    def __init__(self, work: Callable[[Fake], int], client: str = "1.2.3.4") -> None:
        ours, self.other = socket.socketpair()
        ours.setblocking(False)
        self.other.settimeout(20)
        super().__init__(ours, client, inf)
        made.append(self)
        self.work = work
        self.served = self.ends = self.serving = 0

    def serve(self) -> int:
        self.serving += 1
        assert self.serving == 1, "two workers serve one channel"
        try:
            self.served += 1
            return self.work(self)
        finally:
            self.serving -= 1

    def ended(self) -> None:
        assert self.sock.fileno() == -1
        self.ends += 1


def echo(channel: Fake) -> int:
    """Answer each message by itself."""
    try:
        data = channel.sock.recv(100)
    except BlockingIOError:
        return READABLE
    if not data:
        return ENDED
    channel.sock.send(data)
    return READABLE


@contextlib.contextmanager
def polled(workers: int = 4, budgets: Budgets | None = None) -> Iterator[Poller]:
    poller = Poller(Budgets() if budgets is None else budgets, workers)
    poller.start()
    try:
        yield poller
    finally:
        poller.stop()
        for channel in made:
            channel.other.close()
            channel.sock.close()
        made.clear()


def test_channels_are_served_as_they_become_ready_and_idle_ones_take_no_thread() -> None:
    before = set(threading.enumerate())
    with polled(workers=4) as poller:
        channels = [Fake(echo) for _ in range(300)]
        for channel in channels:
            poller.add(channel, READABLE)
        for _ in range(3):
            for channel in channels:
                channel.other.send(b"hello")
            assert {channel.other.recv(100) for channel in channels} == {b"hello"}
        assert len(set(threading.enumerate()) - before) == 4
        for channel in channels:
            channel.other.close()
        until(lambda: {channel.ends for channel in channels} == {1})
        assert not len(poller)


def test_a_channel_that_waits_past_its_deadline_is_ended_by_the_sweep_alone() -> None:
    with polled() as poller:
        late, patient = Fake(echo), Fake(echo)
        late.deadline = time.monotonic() - 1
        for channel in (late, patient):
            poller.add(channel, READABLE)
        poller.sweep()
        assert late.other.recv(1) == b""
        until(lambda: late.ends == 1)
        assert late.late
        patient.other.send(b"still here")
        assert patient.other.recv(100) == b"still here"
        assert not patient.late


def test_a_channel_that_is_being_served_is_not_late() -> None:
    """A worker may be waiting for the disk."""
    begun, go_on = threading.Event(), threading.Event()

    def work(channel: Fake) -> int:
        begun.set()
        go_on.wait(20)
        return echo(channel)

    with polled() as poller:
        channel = Fake(work)
        channel.deadline = time.monotonic() + 5
        poller.add(channel, READABLE)
        channel.other.send(b"x")
        assert begun.wait(20)
        assert channel.deadline == inf
        poller.sweep()
        go_on.set()
        assert channel.other.recv(100) == b"x"


def test_a_parked_channel_is_nobodys_until_it_is_resumed() -> None:
    done = threading.Event()

    def work(channel: Fake) -> int:
        if channel.served == 1:
            done.set()
            return PARKED
        channel.sock.recv(100)
        channel.sock.send(b"answer")
        return READABLE

    with polled() as poller:
        channel = Fake(work)
        poller.add(channel, READABLE)
        channel.other.send(b"question")
        assert done.wait(20)
        channel.other.send(b"more")
        poller.sweep()
        assert channel.served == 1
        poller.resume(channel)
        assert channel.other.recv(100) == b"answer"


def test_a_parked_channel_whose_other_end_left_is_closed_once_when_it_is_resumed() -> None:
    parked = threading.Event()

    def work(channel: Fake) -> int:
        if channel.served == 1:
            parked.set()
            return PARKED
        return ENDED

    with polled() as poller:
        channel = Fake(work)
        poller.add(channel, READABLE)
        channel.other.send(b"question")
        assert parked.wait(20)
        channel.other.close()
        poller.end(channel)
        assert not channel.ends
        poller.resume(channel)
        until(lambda: channel.ends == 1)
        poller.end(channel)
        poller.resume(channel)
        assert (channel.ends, channel.served) == (1, 2)


def test_what_is_parked_when_the_poller_stops_is_closed_once() -> None:
    parked = threading.Event()

    def work(channel: Fake) -> int:
        parked.set()
        return PARKED

    with polled() as poller:
        channel = Fake(work)
        poller.add(channel, READABLE)
        channel.other.send(b"question")
        assert parked.wait(20)
        poller.stop()
        assert channel.ends == 1
        with contextlib.suppress(ConnectionError):
            assert channel.other.recv(1) == b""
        poller.resume(channel)
        late = Fake(echo)
        with pytest.raises(ConnectionAbortedError):
            poller.add(late, READABLE)


def test_a_descriptor_that_is_used_again_belongs_to_the_new_channel_alone() -> None:
    """Ends and sweeps race with closes: what is shut down late must not be the next connection of that number."""
    ended = Fake(echo)
    number = ended.sock.fileno()
    with polled() as poller:
        poller.add(ended, READABLE)
        ended.other.close()
        until(lambda: ended.ends == 1)
        reused = [Fake(echo) for _ in range(8)]
        assert number in {channel.sock.fileno() for channel in reused}
        for channel in reused:
            poller.add(channel, READABLE)
        ended.deadline = 0.0
        poller.end(ended)
        poller.sweep()
        for channel in reused:
            channel.other.send(b"x")
            assert channel.other.recv(1) == b"x"


def test_ends_sweeps_and_closes_at_once_leave_no_descriptor_and_close_none_twice() -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with polled(workers=8) as poller:
        for _ in range(20):
            channels = [Fake(echo) for _ in range(30)]
            for at, channel in enumerate(channels):
                channel.deadline = 0.0 if at % 3 else inf
                poller.add(channel, READABLE)
            enders = [
                threading.Thread(target=poller.sweep),
                threading.Thread(target=poller.end_all, args=(Fake,)),
                threading.Thread(target=lambda these=channels: [channel.other.close() for channel in these]),
            ]
            for thread in enders:
                thread.start()
            for thread in enders:
                thread.join()
            until(lambda these=channels: {channel.ends for channel in these} == {1})
            assert not len(poller)
    until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= descriptors)


def test_an_address_does_not_take_all_workers_and_its_channels_are_served_in_turn() -> None:
    budgets = Budgets()
    budgets.held_max[Resource.SENDS] = 4
    go_on = threading.Event()

    def stuck(channel: Fake) -> int:
        go_on.wait(20)
        return echo(channel)

    with polled(workers=4, budgets=budgets) as poller:
        greedy = [Fake(stuck, "greedy") for _ in range(12)]
        for channel in greedy:
            poller.add(channel, READABLE)
            channel.other.send(b"x")
        until(lambda: sum(channel.serving for channel in greedy) == 3)
        honest = Fake(echo, "honest")
        poller.add(honest, READABLE)
        honest.other.send(b"y")
        assert honest.other.recv(1) == b"y"
        assert sum(channel.serving for channel in greedy) == 3
        go_on.set()
        assert {channel.other.recv(1) for channel in greedy} == {b"x"}
        until(lambda: not budgets.used[Resource.SENDS])


def test_a_channel_with_more_to_do_goes_on_while_nobody_else_is_ready_and_gives_way_then() -> None:
    order: list[str] = []
    go_on = threading.Event()

    def long(channel: Fake) -> int:
        order.append("long")
        go_on.wait(20)
        return READABLE if channel.served > 5 else AGAIN

    def short(channel: Fake) -> int:
        order.append("short")
        return echo(channel)

    with polled(workers=1) as poller:
        first, second = Fake(long), Fake(short)
        poller.add(first, READABLE)
        poller.add(second, READABLE)
        first.other.send(b"x")
        until(lambda: order == ["long"])
        second.other.send(b"y")
        go_on.set()
        assert second.other.recv(1) == b"y"
    assert order[:2] == ["long", "short"]
    assert order.count("long") >= 1


def test_a_bug_costs_its_connection_and_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    def broken(channel: Fake) -> int:
        raise RuntimeError("a bug")

    caplog.set_level(logging.ERROR)
    with polled(workers=1) as poller:
        for _ in range(3):
            channel = Fake(broken)
            poller.add(channel, WRITABLE)
            assert channel.other.recv(1) == b""
        sound = Fake(echo)
        poller.add(sound, READABLE)
        sound.other.send(b"x")
        assert sound.other.recv(1) == b"x"
    assert caplog.text.count("RuntimeError: a bug") == 3
