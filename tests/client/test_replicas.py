"""Which ranks get the same samples, and how the leader's decisions reach its followers: in one process, over real
sockets. Whole jobs are in tests/trainers/test_replicas.py."""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from quiver.errors import BadRequest
from quiver.substitution import Order
from quiver_client import BatchSampler, DataLoader, Dataset, merge_states
from quiver_client.loader import rank as rank_module
from quiver_client.loader.epoch import Epoch, ShardLayout
from quiver_client.loader.replicas import leader as leader_module
from quiver_client.loader.replicas.follower import Followed, FollowedPass, FollowerStream
from quiver_client.loader.replicas.group import group_in_mesh, group_of, share_of_group
from quiver_client.loader.replicas.leader import LeaderStream
from quiver_client.loader.replicas.log import AHEAD_MAX, DecisionLog
from quiver_client.loader.replicas.meeting import Invitation, publish, try_to_meet
from quiver_client.loader.replicas.messages import Drawn, Frames, Hello, Join, Left, encode
from tests.support.data import Files
from tests.support.residency import Rack, told
from tests.support.threads import alive
from tests.support.waiting import until

SAMPLES = 150
Group = Callable[[int, int], None]


@pytest.fixture
def keys(files: Files, tmp_path: Path, dataset: Callable[..., Dataset]) -> Dataset:
    """The dataset with its keys only: no bytes are read."""
    return dataset(files.manifest, f"file://{tmp_path}/cache?capacity=1GiB", fields=["__key__"])


@pytest.fixture
def group() -> Iterator[Group]:
    """Make a process group in which this process is one of several. Nothing is communicated."""

    def make(rank: int, world_size: int) -> None:
        torch.distributed.init_process_group("fake", rank=rank, world_size=world_size)

    import torch.testing._internal.distributed.fake_pg  # registers the backend

    yield make
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# -- which ranks ------------------------------------------------------------------------------------------------------

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda shape: np.prod(shape) <= 64)


@given(shapes, st.data())
def test_ranks_that_differ_in_data_parallel_dimensions_read_different_shares_and_others_the_same(
    shape: list[int], data: st.DataObject
) -> None:
    count = int(np.prod(shape))
    mesh = np.asarray(data.draw(st.permutations(range(count))), np.int64).reshape(shape)
    dims = sorted(data.draw(st.sets(st.integers(0, len(shape) - 1))))
    groups = [group_in_mesh(mesh, dims, rank, root=mesh) for rank in range(count)]
    at = {int(mesh[place]): place for place in np.ndindex(*shape)}
    for one, other in itertools.product(range(count), repeat=2):
        same = all(at[one][dim] == at[other][dim] for dim in dims)
        assert same == (groups[one].rank == groups[other].rank) == (other in groups[one].members)
    assert {each.world_size for each in groups} == {int(np.prod([shape[dim] for dim in dims]))}
    assert {each.rank for each in groups} == set(range(groups[0].world_size))
    for each in groups:
        assert [groups[rank].is_leader for rank in each.members] == [True, *[False] * len(each.followers)]


@given(shapes, st.data())
def test_the_share_of_a_process_group_follows_from_its_form(shape: list[int], data: st.DataObject) -> None:
    count = int(np.prod(shape))
    mesh = np.arange(count).reshape(shape)
    dims = sorted(data.draw(st.sets(st.integers(0, len(shape) - 1))))
    found: dict[tuple[int, ...], tuple[int, int] | None] = {}
    for rank in range(count):
        members = group_in_mesh(mesh, dims, rank, root=mesh).members
        found[members] = share_of_group(members, count)
    assert sorted(each for each in found.values() if each is not None) == [(n, len(found)) for n in range(len(found))]


def test_a_group_whose_form_does_not_divide_the_ranks_has_no_share_of_its_own() -> None:
    assert share_of_group((0, 1, 3), 6) is None
    assert share_of_group((0, 1), 3) is None
    assert share_of_group((1, 2), 4) is None


def test_a_part_of_a_mesh_stands_for_the_mesh_that_it_was_taken_from(group: Group) -> None:
    """``mesh["dp"]`` has other ranks in each tensor-parallel rank, and those must get the same samples all the same."""
    group(5, 8)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    whole = group_of(mesh, None, None, None)
    assert whole is not None
    assert (whole.rank, whole.world_size, whole.members) == (2, 4, (4, 5))
    assert group_of(mesh["dp_replicate", "dp_shard"], None, None, None) == whole
    assert group_of((mesh, ("dp_shard", "dp_replicate")), None, None, None) == whole
    assert group_of((mesh, "dp_replicate"), None, None, None).members == (4, 5, 6, 7)  # type: ignore[union-attr]
    assert group_of((mesh, ()), None, None, None).world_size == 1  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"^mesh: it is part of .* whether 'dp_shard' gets other samples is not known"):
        group_of(mesh["dp_replicate"], None, None, None)


def test_a_mesh_that_does_not_say_which_ranks_share_is_refused(keys: Dataset, group: Group) -> None:
    group(1, 4)
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "tp"))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"mesh": named}, r"mesh: its dimensions are 'x', 'tp', and whether 'x' is .*mesh=\(device_mesh, \('dp',\)\)"),
        ({"mesh": named["tp"]}, "mesh: its dimensions are 'tp', and none of them is data-parallel"),
        ({"mesh": (named, ("dp",))}, "mesh: it has no dimension 'dp'; its dimensions are 'x', 'tp'"),
        ({"mesh": (named, 3)}, "mesh: it has no dimension 3"),
        ({"mesh": init_device_mesh("cpu", (4,))}, "mesh: its dimensions have no names"),
        ({"mesh": "dp"}, "mesh: give a torch.distributed.device_mesh.DeviceMesh, not str"),
        ({"mesh": DeviceMesh("cpu", [0, 2], mesh_dim_names=("dp",))}, "mesh: this process, rank 1, is not in it"),
        ({"mesh": (named, "x"), "rank": 0, "world_size": 2}, "mesh: rank and world_size follow from it"),
        ({"mesh": (named, "x"), "replicate": named["tp"].get_group()}, "replicate: mesh says already"),
        ({"replicate": named}, "replicate: give a torch.distributed.ProcessGroup, not DeviceMesh"),
        ({"replicate": torch.distributed.GroupMember.NON_GROUP_MEMBER}, "replicate: this process is not in the group"),
        ({"replicate": torch.distributed.new_group([0, 1, 3])}, "replicate: which share the group of ranks 0, 1, 3"),
        ({"replicate": named["tp"].get_group(), "rank": 0}, "world_size: give rank and world_size both"),
    ]
    for given_arguments, why in refused:
        for make in (DataLoader, BatchSampler):
            with pytest.raises(ValueError, match=f"^{why}"):
                make(keys, 10, **given_arguments)
    order = BatchSampler(keys, 10, replicate=torch.distributed.new_group([0, 1, 3]), rank=2, world_size=3)
    assert (order.deal.rank, order.deal.world_size) == (2, 3)


def test_without_a_process_group_replicate_is_refused(keys: Dataset) -> None:
    with pytest.raises(ValueError, match=r"^replicate: call torch\.distributed\.init_process_group"):
        DataLoader(keys, 10, replicate=object())


def test_several_ranks_of_one_share_are_named_once_and_report_by_names_of_their_own(
    keys: Dataset, group: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rack = Rack(keys.manifest.shard_count)
    told(monkeypatch, rack)
    monkeypatch.setattr(rank_module, "_warned", [])
    names = set()
    for rank in (2, 3):
        group(rank, 4)
        with caplog.at_level(logging.WARNING, "quiver_client"), DataLoaders() as loaders:
            for _ in range(2):
                loader = loaders.made(keys, 10, shuffle=True, rank=1, world_size=2, job="one")
                assert len(list(loader)) == 8
        names |= {report.consumer for report in rack.reports}
        torch.distributed.destroy_process_group()
        rack.reports.clear()
        rack.left = False
    said = [record.getMessage() for record in caplog.records if "mesh=device_mesh" in record.getMessage()]
    assert said == [said[0]]
    assert said[0].startswith("rank=1, world_size=2: torch.distributed has 4 ranks")
    assert len(names) == 4, "two loaders of two processes"


class DataLoaders:
    """Loaders that are closed at the end."""

    def __enter__(self) -> DataLoaders:
        self._made: list[DataLoader] = []
        return self

    def made(self, *args: Any, **named: Any) -> DataLoader:
        self._made.append(DataLoader(*args, **named))
        return self._made[-1]

    def __exit__(self, *_: object) -> None:
        for each in self._made:
            each.close()


def test_equal_states_of_one_rank_merge_as_one(keys: Dataset) -> None:
    states = []
    for rank in (0, 0, 1, 1):
        order = BatchSampler(keys, 10, rank=rank, world_size=2, substitute=False)
        next(iter(order))
        states.append(order.state_dict())
    assert merge_states(states) == merge_states(states[1:3])
    with pytest.raises(ValueError, match=r"ranks \[0, 0, 1\] given"):
        merge_states([states[0], {**states[1], "own": None, "batches": 0}, states[2]])


# -- the log ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(["begin", "decide", "end", "deliver", "join", "draw", "leave"]), max_size=200))
def test_a_follower_draws_what_the_leader_decided_whatever_comes_first(events: list[str]) -> None:
    """Model: what is drawn of a pass is a prefix of what was decided in it. Messages arrive in order, at any time."""
    log, followed, rank = DecisionLog([7]), Followed(), 7
    to_leader: list[Any] = []
    to_follower: list[Any] = []
    decided: dict[int, list[bytes]] = {}
    drawn: dict[int, list[bytes]] = {}
    own = 0  # the follower's pass
    reads = leads = False
    for event in [*events, "deliver"]:
        if event == "begin" and not leads and not log.behind:
            log.begin(log.last + 1)
            decided[log.last], leads = [], True
        elif event == "decide" and leads and log.last in log.passes and not log.passes[log.last].slow:
            decided[log.last].append(bytes([len(decided[log.last]) % 250, log.last % 250]))
            log.passes[log.last].decide(decided[log.last][-1])
        elif event == "end" and leads:
            log.end(log.last, len(decided[log.last]), at_end=False)
            leads = False
        elif event == "join" and not reads:
            own, reads = own + 1, True
            followed.passes[own], drawn[own] = FollowedPass(), []
            to_leader.append(Join(own))
        elif event == "draw" and reads and followed.passes[own].decisions:
            drawn[own].append(followed.passes[own].decisions.popleft())
            to_leader.append(Drawn(own, len(drawn[own])))
        elif event == "leave" and reads:
            del followed.passes[own]
            to_leader.append(Left(own, len(drawn[own]), at_end=False))
            reads = False
        elif event == "deliver":
            for message in to_leader:
                assert log.hear(rank, message)
            to_leader.clear()
            while (message := log.next_for(rank)) is not None:
                to_follower.append(message)
            for message in to_follower:
                assert followed.hear(message)
            to_follower.clear()
        assert all(each.kept <= AHEAD_MAX for each in log.passes.values())
    for number, batches in drawn.items():
        assert batches == decided.get(number, [])[: len(batches)]
    if reads and own in decided and own in log.passes:
        assert [*drawn[own], *followed.passes[own].decisions] == decided[own]


def test_what_makes_no_sense_from_a_follower_is_refused() -> None:
    log = DecisionLog([1])
    assert not log.hear(1, Drawn(1, 1))
    assert not log.hear(1, Left(5, 1, at_end=True))
    assert all(log.hear(1, Join(number)) for number in range(1, 65))
    assert not log.hear(1, Join(65)), "it begins no more passes than these before the leader does"
    log.begin(1)
    assert not log.hear(1, Join(1))
    assert not log.hear(1, Drawn(1, 1)), "it was not sent a batch"


def test_a_decision_that_cannot_be_drawn_is_refused() -> None:
    layout = ShardLayout(np.array([0, 0, 1, 1]), np.array([2, 2]), np.ones(2), 2.0)
    epoch = Epoch(0, np.array([3, 1, 0, 2]), layout)
    assert epoch.decode_decision(epoch.encode_decision(np.array([0, 1])), 2).tolist() == [0, 1]
    wrong: list[list[int]] = [[], [0, 1, 2], [0, 0], [4], [-1], [3]]  # the first of shard 1 is entry 0
    for entries in wrong:
        with pytest.raises(BadRequest):
            epoch.decode_decision(epoch.encode_decision(np.asarray(entries, np.int64)), 2)
    with pytest.raises(BadRequest):
        epoch.decode_decision(b"\0" * 7, 2)
    epoch.draw(np.array([0]))
    with pytest.raises(BadRequest):
        epoch.decode_decision(epoch.encode_decision(np.array([0])), 2)
    assert Order(np.array([0, 1]), 2).are_pending(np.array([1, 0]))


# -- over sockets -----------------------------------------------------------------------------------------------------


class Pair:
    """A leader's stream, and followers that met it through a real store."""

    def __init__(self, followers: tuple[int, ...] = (1,)) -> None:
        self.store = torch.distributed.HashStore()
        self.leader = LeaderStream(DecisionLog(followers), 4096)
        publish(self.store, "key", self.leader.invitation)
        self.followers: list[FollowerStream] = []
        self.begin(1)

    def begin(self, number: int) -> None:
        with self.leader.changed:
            self.leader.log.begin(number)

    def follower(self, rank: int = 1) -> FollowerStream:
        sock = try_to_meet(self.store, "key", rank)
        assert sock is not None
        self.followers.append(FollowerStream(sock, 4096))
        return self.followers[-1]

    def decide(self, decision: bytes) -> None:
        with self.leader.changed:
            self.leader.log.passes[1].decide(decision)
        self.leader.wake()

    def stranger(self) -> socket.socket:
        invitation = self.leader.invitation
        return socket.create_connection((invitation.host, invitation.port))


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for each in (*made.followers, made.leader):
        each.close()
    assert alive("quiver-replicas") == []


def arrives(follower: FollowerStream, decision: bytes) -> None:
    until(lambda: follower.decision(1) == decision)
    follower.drawn(1)


def test_garbage_a_wrong_secret_and_silence_delay_no_follower(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "STRANGERS_MAX", 3)
    follower = pair.follower()
    follower.join(1)
    strangers = [pair.stranger() for _ in range(20)]  # more than are kept
    invitation = pair.leader.invitation
    sent = [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000, encode(Hello(b"guessed", 1)), encode(Join(1))]
    sent += [encode(Hello(invitation.followers_secret, 9)), b"\0\0\0\1\xc1", b"\0\0"]
    for stranger, data in zip(strangers, itertools.cycle(sent), strict=False):
        with contextlib.suppress(OSError):  # it was dropped already
            stranger.sendall(data)
    pair.decide(b"first")
    arrives(follower, b"first")
    for stranger in strangers[:7]:  # those that sent something, or came first, are dropped
        stranger.settimeout(20)
        with contextlib.suppress(OSError):
            assert stranger.recv(1) == b""
    for stranger in strangers:
        stranger.close()
    pair.decide(b"second")
    arrives(follower, b"second")
    assert pair.leader.failed is None
    assert pair.leader.log.missing == []


def test_a_leader_that_does_not_know_the_secret_is_not_followed(pair: Pair) -> None:
    ours = pair.leader.invitation
    for wrong in (
        Invitation(ours.host, ours.port, ours.followers_secret, b"x" * 16),
        Invitation(ours.host, ours.port, b"x" * 16, ours.leaders_secret),
        Invitation(ours.host, 1, ours.followers_secret, ours.leaders_secret),
    ):
        publish(pair.store, "key", wrong)
        assert try_to_meet(pair.store, "key", 1) is None
    for text in ("", "{", '{"host": 1}', "x" * 5000):
        pair.store.set("key", text)
        assert try_to_meet(pair.store, "key", 1) is None
    assert try_to_meet(pair.store, "another", 1) is None


def test_a_follower_that_dies_is_missed_and_one_that_says_goodbye_may_come_again(pair: Pair) -> None:
    sock = try_to_meet(pair.store, "key", 1)
    assert sock is not None
    sock.sendall(encode(Join(1)))
    sock.close()
    until(lambda: pair.leader.log.missing == [1])
    again = pair.follower()
    until(lambda: pair.leader.log.missing == [])
    again.close()
    until(lambda: pair.leader.log.passes[1].behind == [], what="it left")
    assert pair.leader.log.missing == []


def test_a_follower_that_draws_nothing_holds_few_batches_however_many_are_decided(pair: Pair) -> None:
    follower = pair.follower()
    follower.join(1)
    for number in range(AHEAD_MAX):
        pair.decide(b"%d" % number)
    until(lambda: len(follower.followed.passes[1].decisions) == AHEAD_MAX)
    with pair.leader.changed:
        assert pair.leader.log.passes[1].slow == [1], "the next one waits"
        assert pair.leader.log.passes[1].kept == 0
    for number in range(AHEAD_MAX):
        arrives(follower, b"%d" % number)
    until(lambda: pair.leader.log.passes[1].slow == [])


def test_what_a_leader_decided_before_it_closed_still_arrives(pair: Pair) -> None:
    follower = pair.follower()
    follower.join(1)
    for number in range(20):
        pair.decide(b"%d" % number * 100)
    with pair.leader.changed:
        pair.leader.log.end(1, 20, at_end=True)
    pair.leader.close()
    until(lambda: bool(follower.followed.lost))
    assert len(follower.followed.passes[1].decisions) == 20
    assert follower.followed.passes[1].left == Left(1, 20, at_end=True)
    assert follower.followed.said_bye


@given(st.binary(max_size=200), st.integers(1, 64))
def test_whatever_arrives_is_a_message_or_refused(data: bytes, piece: int) -> None:
    frames = Frames(100)
    for start in range(0, len(data), piece):
        frames.add(data[start : start + piece])
        try:
            while frames.next() is not None:
                pass
        except BadRequest:
            return


def test_a_patient_loop_waits_and_an_impatient_one_raises(caplog: pytest.LogCaptureFixture) -> None:
    from quiver.errors import Unavailable
    from quiver_client.loader.replicas.patience import Patience

    now = [time.monotonic()]
    patience = Patience(30, clock=lambda: now[0])
    patience.check(lambda: "rank 1", "sleeps")
    now[0] += 1000  # prefetching may wait for ever
    patience.check(lambda: "rank 1", "sleeps")
    patience.begin()
    for seconds, warnings in ((5, 0), (10, 1), (10, 1)):
        now[0] += seconds
        with caplog.at_level(logging.WARNING, "quiver_client"):
            patience.check(lambda: "rank 1", "sleeps")
        assert len(caplog.records) == warnings
    now[0] += 5
    with pytest.raises(Unavailable, match="rank 1: sleeps: waited 30 s"):
        patience.check(lambda: "rank 1", "sleeps")
