"""Training through daemons whose answers are damaged, short, long, redirected, late or never end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.chaos.rack import ChaosRack, Plan
from tests.chaos.toxics import UP, Bandwidth, BitFlip, Garbage, Hang, Head, Latency, LyingLength, Reset, Toxic, Truncate
from tests.chaos.validators import fired
from tests.support.data import Files
from tests.support.waiting import until

pytestmark = pytest.mark.chaos
GREY_SECONDS_MAX = 10.0  # of one batch: a reader gives up a silent daemon after 5 s, on a loaded machine too

DAMAGE: dict[str, Sequence[Toxic]] = {
    "a flipped bit": [BitFlip(chance=0.5)],
    "short": [LyingLength(-9, chance=0.2)],
    "long": [LyingLength(9, chance=0.1)],
    "an absurd length": [LyingLength(1 << 40, chance=0.3)],
    "garbage after the body": [Garbage(chance=0.5)],
    "truncated": [Truncate(30_000, chance=0.7)],
}


@pytest.mark.fault("N1")
@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_answers_are_discarded_counted_and_read_elsewhere(
    chaos_data: Files, tmp_path: Path, seed: int, what: str
) -> None:
    with ChaosRack(tmp_path, chaos_data, Plan(seed=seed)) as rack:
        rack.check(rack.client(epochs=1).wait())
        leaks = rack.leaks()
        clients = [rack.client(epochs=2, pause_seconds=0.01), rack.client(epochs=2, pause_seconds=0.01, verify="full")]
        until(lambda: all(client.samples() for client in clients), 40)
        for proxy in rack.proxies:  # between daemons, and between them and clients
            proxy.add(*DAMAGE[what])
        histories = [client.wait(90) for client in clients]
        rack.check(*histories, wait_seconds=15)
        assert max(held["memory"] for history in histories for held in history.held) < 1 << 30
        fired(rack.network.fired(), *(toxic.name for toxic in DAMAGE[what]))
        found = sum(history.stats["corruptions"] + history.stats["fallbacks"] for history in histories)
        assert found > 0, "and it is counted"
        for proxy in rack.proxies:
            proxy.clear()
        rack.check(rack.client(epochs=1).wait(), wait_seconds=4)
        leaks.check()


HEADS = {
    "redirect": Head("302 Found", {"Location": "http://127.0.0.1:9/v1/read"}),
    "content encoding": Head(headers={"Content-Encoding": "gzip"}),
    "a huge header": Head(headers={"X": "x" * (1 << 20)}),
    "many headers": Head(headers={f"X{number}": "x" * 60 for number in range(5_000)}),
}


@pytest.mark.fault("N3")
@pytest.mark.parametrize("what", HEADS)
def test_heads_that_no_daemon_sends_are_refused(chaos_data: Files, tmp_path: Path, seed: int, what: str) -> None:
    with ChaosRack(tmp_path, chaos_data, Plan(seed=seed)) as rack:
        rack.check(rack.client(epochs=1).wait())
        wrong = rack.proxies[1]
        wrong.add(HEADS[what])
        wrong.sever()  # connections that are open have had their heads
        leaks = rack.leaks()
        history = rack.client(epochs=2, cache=rack.proxies[0].url).wait(90)
        rack.check(history, wait_seconds=10)
        fired(rack.network.fired(), "Head")
        assert history.stats["fallbacks"] > 0, "it was asked, and another one in its place"
        leaks.check()


GREY: dict[str, Sequence[Toxic]] = {
    "reset midway": [Reset(40_000, chance=0.5)],
    "takes and never answers": [Hang()],
    "takes nothing": [Hang(direction=UP)],
    "stops midway": [Hang(40_000)],
    "drips": [Bandwidth(1024)],
    "slow but alive": [Latency(0.1, 0.1), Bandwidth(1 << 20)],
}


@pytest.mark.fault("N2")
@pytest.mark.parametrize("what", GREY)
def test_a_peer_that_is_late_or_never_answers_costs_no_sample(
    chaos_data: Files, tmp_path: Path, seed: int, what: str
) -> None:
    with ChaosRack(tmp_path, chaos_data, Plan(seed=seed)) as rack:
        rack.check(rack.client(epochs=1).wait())
        leaks = rack.leaks()
        grey = rack.proxies[1]
        grey.add(*GREY[what])
        history = rack.client(epochs=2, cache=rack.proxies[0].url).wait(90)
        rack.check(history, wait_seconds=GREY_SECONDS_MAX)
        fired(rack.network.fired(), *(toxic.name for toxic in GREY[what]))
        grey.clear()
        rack.check(rack.client(epochs=1, cache=rack.proxies[0].url).wait(), wait_seconds=4)
        leaks.check()
