"""The pure membership, with a list, and with a simulated etcd that loses, repeats, freezes and forgets."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver import membership as m
from quiver.membership.record import write
from quiver.ring import MEMBERS_MAX, Member

TTL = 10.0
OWN = Member("self", "http://10.0.0.1:7717", 5.0)
PREFIX = "/quiver/racks/r/members/"


def begin(now: float = 0.0) -> m.State:
    return m.begin("r", OWN, "session-0", 1, TTL, now)


def record(name: str, revision: int = 1, *, url: str = "", session: str = "s", lease: int = 7, **more: Any) -> m.Entry:
    fields = {"url": url or f"http://{name}:7717", "weight": 2.0, "session": session, "state": "up", **more}
    return m.Entry(PREFIX + name, msgspec.json.encode(fields), revision, lease)


def ids(state: m.State) -> list[str]:
    return [member.id for member in state.ring.members]


def learn(state: m.State, *events: m.Event, now: float = 0.0) -> m.State:
    for event in events:
        state, _ = m.step(state, event, now)
    return state


def standing(*entries: m.Entry, revision: int = 10) -> m.State:
    """A state that is connected, has listed these entries, and watches."""
    return learn(begin(), m.Connected(), m.Listed(entries, revision), m.Watching())


# A simulated registry ------------------------------------------------------------------------------------------------


@dataclass
class Registry:
    """A simulated etcd, as a member sees it, with its faults and a clock of its own."""

    state: m.State = field(default_factory=begin)
    now: float = 0.0
    keys: dict[str, m.Entry] = field(default_factory=dict)
    revision: int = 1
    leases: dict[int, float] = field(default_factory=dict)
    log: list[m.Entry | m.Gone] = field(default_factory=list)
    watched_to: int | None = None
    stuck: bool = False
    away: bool = False
    writes: int = 0
    numbers: Any = field(default_factory=lambda: itertools.count(100))

    def put(self, entry: m.Entry) -> m.Entry:
        self.revision += 1
        self.keys[entry.key] = entry = replace(entry, revision=self.revision)
        self.log.append(entry)
        return entry

    def delete(self, key: str) -> None:
        if self.keys.pop(key, None):
            self.revision += 1
            self.log.append(m.Gone(key, self.revision))

    def revoke(self, lease: int) -> None:
        self.leases.pop(lease, None)
        for key in [key for key, entry in self.keys.items() if entry.lease == lease]:
            self.delete(key)

    def wipe(self) -> None:
        self.keys, self.leases, self.log, self.revision = {}, {}, [], 1
        self.watched_to = None

    def replay(self) -> None:
        """Deliver old events again."""
        if self.watched_to is not None and self.log:
            self.learn(m.Changed(tuple(self.log[-5:])))

    def learn(self, event: m.Event) -> m.Action:
        self.state, action = m.step(self.state, event, self.now)
        return action

    def run(self, seconds: float) -> None:
        """Run the member for this long."""
        end = self.now + seconds
        for _ in range(5000):
            for lease in [lease for lease, until in self.leases.items() if until < self.now]:
                self.revoke(lease)
            if self.away:
                self.learn(m.Lost())
                self.now, self.watched_to = end, None
                return
            action = self.learn(m.Tick() if self.state.connected else m.Connected())
            if isinstance(action, m.Wait) and not self._news():
                self.now = min(end, action.until)
                if self.now == end:
                    return
            else:
                self._carry_out(action)
        raise AssertionError(f"the member never becomes idle: {self.state}")

    def _news(self) -> tuple[m.Entry | m.Gone, ...]:
        if self.stuck or self.watched_to is None:
            return ()
        return tuple(change for change in self.log if change.revision >= self.watched_to)

    def _carry_out(self, action: m.Action) -> None:
        match action:
            case m.List():
                self.learn(m.Listed(tuple(self.keys.values()), self.revision))
            case m.Watch(from_revision):
                self.watched_to = from_revision
                self.learn(m.Watching())
            case m.Grant():
                lease = next(self.numbers)
                self.leases[lease] = self.now + TTL
                self.learn(m.LeaseGranted(lease))
            case m.KeepAlive(lease):
                if lease in self.leases:
                    self.leases[lease] = self.now + TTL
                self.learn(m.LeaseKept() if lease in self.leases else m.LeaseLost())
            case m.Register(key, value, lease, over):
                self.writes += 1
                found = self.keys[key].revision if key in self.keys else 0
                if lease not in self.leases:
                    self.learn(m.LeaseLost())
                elif found != over:
                    self.learn(m.Refused())
                else:
                    self.learn(m.Registered(self.put(m.Entry(key, value, 0, lease))))
            case m.Reconnect():
                self.watched_to = None
                self.learn(m.Lost())
            case m.Wait():
                news = self._news()
                self.watched_to = news[-1].revision + 1
                self.learn(m.Changed(news))


NAMES = st.sampled_from(["a", "b", "c", "d", "self"])
OPS = st.one_of(
    st.tuples(st.just("join"), NAMES.filter(lambda name: name != "self")),
    st.tuples(st.just("junk"), NAMES),
    st.tuples(st.just("delete"), NAMES),
    st.tuples(st.sampled_from(["wipe", "revoke", "replay", "stick", "unstick", "leave", "return"]), st.just("")),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 0.5, 4.0, 11.0])),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(OPS, max_size=25))
def test_after_any_events_the_ring_converges_to_the_list_and_self(ops: list[tuple[str, Any]]) -> None:
    etcd = Registry()
    for what, arg in ops:
        match what:
            case "join":
                etcd.put(record(arg, lease=0))
            case "junk":
                etcd.put(m.Entry(PREFIX + arg, b"{", 0, 0))
            case "delete":
                etcd.delete(PREFIX + arg)
            case "wait":
                etcd.run(arg)
            case "revoke":
                etcd.revoke(etcd.state.lease)
            case "stick" | "unstick":
                etcd.stuck = what == "stick"
            case "leave" | "return":
                etcd.away = what == "leave"
            case _:
                getattr(etcd, what)()
    etcd.away = False
    etcd.run(3 * TTL)
    listed = {key.removeprefix(PREFIX) for key, entry in etcd.keys.items() if entry.value != b"{"}
    assert set(ids(etcd.state)) == listed | {"self"}
    assert etcd.state.registered
    assert etcd.keys[PREFIX + "self"].value == write(OWN, "session-0")
    assert etcd.keys[PREFIX + "self"].lease in etcd.leases


def test_an_idle_member_writes_nothing() -> None:
    etcd = Registry()
    etcd.run(100 * TTL)
    assert etcd.writes == 1


def test_a_key_that_is_deleted_repeatedly_is_written_at_most_once_per_tenth_of_the_ttl() -> None:
    etcd = Registry()
    for _ in range(1000):
        etcd.run(0.01)
        etcd.delete(PREFIX + "self")
    assert 5 <= etcd.writes <= 12


@pytest.mark.fault("M3", "M4")
def test_a_lease_that_is_revoked_repeatedly_is_replaced_at_a_bounded_rate() -> None:
    etcd = Registry()
    for _ in range(1000):
        etcd.run(0.01)
        etcd.revoke(etcd.state.lease)
    assert etcd.writes <= 25  # each try with a dead lease, and each retry, at most once per tenth of the TTL


# The ring and the list -----------------------------------------------------------------------------------------------

ENTRIES = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.integers(1, 40), st.booleans()),
    unique_by=lambda entry: entry[0],
    max_size=6,
)
EVENTS = st.one_of(
    st.just(m.Tick()),
    st.just(m.Lost()),
    st.just(m.Connected()),
    st.just(m.Watching()),
    st.just(m.LeaseLost()),
    st.builds(m.LeaseGranted, st.integers(1, 9)),
    st.builds(lambda name, at: m.Changed((record(name, at),)), st.sampled_from("abcdef"), st.integers(1, 60)),
    st.builds(lambda name, at: m.Changed((m.Gone(PREFIX + name, at),)), st.sampled_from("abcdef"), st.integers(1, 60)),
    st.builds(lambda found, at: m.Listed(tuple(_some(found)), at), ENTRIES, st.integers(1, 60)),
)


def _some(found: list[tuple[str, int, bool]]) -> list[m.Entry]:
    return [record(name, at) if good else m.Entry(PREFIX + name, b"junk", at, 0) for name, at, good in found]


@pytest.mark.fault("M4")
@given(st.lists(EVENTS, max_size=20), ENTRIES, st.integers(40, 90))
def test_after_a_list_the_ring_is_the_list(events: list[m.Event], found: list[tuple[str, int, bool]], at: int) -> None:
    state = learn(begin(), m.Connected(), *events, m.Listed(tuple(_some(found)), at))
    state = learn(state, m.Tick(), now=TTL)  # after the time for which a member is kept after an outage
    assert ids(state) == sorted([name for name, _, good in found if good] + ["self"])


def test_a_daemon_without_any_event_is_a_ring_of_one() -> None:
    assert ids(begin()) == ["self"]


@pytest.mark.fault("M4")
def test_an_event_older_than_the_list_is_ignored() -> None:
    state = standing(record("a", 5), revision=10)
    assert ids(learn(state, m.Changed((m.Gone(PREFIX + "a", 9), record("b", 8))))) == ["a", "self"]


def test_a_registry_whose_revisions_restart_at_one_is_accepted() -> None:
    state = standing(record("a", 900), revision=1000)
    state = learn(state, m.Lost(), m.Connected(), m.Listed((record("b", 2),), 3), m.Tick(), now=1.0)
    assert ids(state) == ["a", "b", "self"], "a previous member is kept for a TTL"
    assert ids(learn(state, m.Changed((m.Gone(PREFIX + "b", 4),)), m.Tick(), now=1.0 + TTL)) == ["self"]


@pytest.mark.fault("M3")
def test_a_member_that_comes_back_after_an_outage_never_left_the_ring() -> None:
    state = learn(standing(record("a"), record("b")), m.Lost(), now=1.0)
    state = learn(state, m.Connected(), m.Listed((), 20), now=60.0)
    assert ids(state) == ["a", "b", "self"]
    state = learn(state, m.Changed((record("a", 21),)), now=61.0)
    assert ids(learn(state, m.Tick(), now=60.0 + TTL)) == ["a", "self"]
    state = learn(state, m.Watching(), m.Listed((record("a", 21),), 22), now=66.5)
    state = learn(state, m.Listed((record("a", 21),), 22), m.LeaseGranted(5), now=69.0)
    _, action = m.step(state, m.Registered(m.Entry(state.key, state.value, 23, 5)), 69.0)
    assert action == m.Wait(60.0 + TTL), "it is removed on time, not with the next list"


def test_a_member_that_dies_without_an_outage_leaves_at_once() -> None:
    assert ids(learn(standing(record("a")), m.Changed((m.Gone(PREFIX + "a", 11),)))) == ["self"]


def test_a_short_loss_of_the_connection_keeps_no_missing_member() -> None:
    state = learn(standing(record("a")), m.Lost(), m.Connected(), m.Listed((), 11), now=1.0)
    assert ids(state) == ["self"]


@pytest.mark.parametrize("revision", [11, 12, 900])
def test_an_etcd_that_lost_its_data_and_has_a_higher_revision_moves_no_member(revision: int) -> None:
    state = learn(registered(), m.Changed((record("a", 12),)), m.Lost(), m.Connected(), now=1.0)
    after = learn(state, m.Listed((record("b", revision),), revision), now=1.0)
    assert ids(after) == ["a", "b", "self"]
    own = m.Entry(state.key, state.value, 12, 5)
    after = learn(state, m.Listed((own, record("b", 900)), 900), now=1.0)
    assert ids(after) == ["b", "self"], "the daemon's own key exists, so nothing was lost: a missing member has left"


def test_an_etcd_whose_revision_is_below_that_of_a_past_event_has_lost_its_data() -> None:
    state = learn(standing(record("a")), m.Changed((record("b", 20),)), m.Lost(), m.Connected(), now=1.0)
    assert ids(learn(state, m.Listed((), 15), now=1.0)) == ["a", "b", "self"]


@pytest.mark.fault("M4")
def test_a_watch_that_misses_the_changes_of_two_lists_is_replaced() -> None:
    state = learn(standing(), m.Listed((record("a", 11),), 11))
    assert state.behind == 1
    state, action = m.step(state, m.Listed((record("a", 11), record("b", 12)), 12), 0.0)
    assert action == m.Reconnect()


def test_a_watch_that_delivers_changes_before_the_list_is_kept() -> None:
    state = learn(standing(), m.Changed((record("a", 11),)), m.Listed((record("a", 11),), 11))
    assert state.behind == 0


# The daemon's own key ------------------------------------------------------------------------------------------------


def registered() -> m.State:
    state = learn(standing(), m.LeaseGranted(5))
    return learn(state, m.Registered(m.Entry(state.key, state.value, 11, 5)))


def test_keeping_the_lease_has_priority() -> None:
    state, action = m.step(learn(registered(), m.Lost()), m.Connected(), 30.0)
    assert action == m.KeepAlive(5)
    assert m.step(state, m.LeaseLost(), 30.0)[1] == m.List()


def test_the_daemon_rewrites_its_key_when_it_is_gone_or_overwritten() -> None:
    state = registered()
    assert state.registered
    gone = m.Changed((m.Gone(state.key, 12),))
    wrong = m.Changed((m.Entry(state.key, b"junk", 12, 5),))
    other = m.Changed((m.Entry(state.key, state.value, 12, 0),))
    for event, over in [(gone, 0), (wrong, 12), (other, 12)]:
        after, action = m.step(state, event, 2.0)
        assert not after.registered
        assert action == m.Register(state.key, state.value, 5, over)


def test_draining_is_published_and_owns_nothing_at_once() -> None:
    drained = msgspec.structs.replace(OWN, state="draining")
    state, action = m.step(registered(), m.OwnChanged(drained), 0.0)
    assert isinstance(action, m.Register)
    assert b'"draining"' in action.value
    assert state.ring.owning == ()


def test_a_record_of_an_earlier_process_at_the_same_address_is_replaced_at_once() -> None:
    state = standing(record("self", 9, url=OWN.url, session="former"))
    assert m.step(state, m.LeaseGranted(5), 0.0)[1] == m.Register(state.key, state.value, 5, 9)


@pytest.mark.fault("M8")
def test_a_living_daemon_with_the_same_id_is_detected_after_a_ttl_and_never_overwritten() -> None:
    rival = record("self", 9, url="http://10.0.0.2:7717", session="other")
    state, action = m.step(standing(rival), m.Tick(), 0.0)
    assert isinstance(action, m.Wait)
    for now in (3.0, 6.0, 9.0):
        state, action = m.step(state, m.Listed((rival,), 10), now)
        assert isinstance(action, m.Wait)
        assert state.taken is None
    state, _ = m.step(state, m.Tick(), TTL + 1.0)
    assert state.taken == Member("self", "http://10.0.0.2:7717", 2.0)
    assert [member.url for member in state.ring.members] == ["http://10.0.0.2:7717"], "the ring equals the list"


def test_an_outage_in_which_no_lease_expires_does_not_prove_that_the_holder_of_the_id_lives() -> None:
    rival = record("self", 9, url="http://10.0.0.2:7717", session="other")
    state = learn(standing(rival), m.Lost(), now=1.0)
    state = learn(state, m.Connected(), m.Listed((rival,), 10), m.Watching(), now=60.0)
    assert state.taken is None
    assert learn(state, m.Tick(), now=60.0 + TTL + 1.0).taken is not None


def test_after_a_refused_registration_the_list_is_read_again_first() -> None:
    state = learn(standing(), m.LeaseGranted(5))
    assert m.step(state, m.Refused(), 1.0)[1] == m.List()


def test_the_id_of_a_dead_daemon_is_free_when_its_lease_expires() -> None:
    state = standing(record("self", 9, url="http://10.0.0.2:7717", session="other"))
    state, action = m.step(state, m.Changed((m.Gone(state.key, 12),)), TTL)
    assert action in (m.Grant(), m.List())
    assert state.taken is None


# Untrusted records ---------------------------------------------------------------------------------------------------

HOSTILE = [
    b"",
    b"\xff\xfe",
    b"null",
    b"[" * 4000,
    b'{"url":"http://a:1","weight":1}',
    b'{"url":"http://a:1","weight":NaN,"session":"s"}',
    b'{"url":"http://a:1","weight":1e999,"session":"s"}',
    b'{"url":"http://a:1","weight":-1,"session":"s"}',
    b'{"url":"http://a:1","weight":0,"session":"s"}',
    b'{"url":"http://a:1","weight":true,"session":"s"}',
    b'{"url":"http://a:1","weight":1,"session":"s","state":"gone"}',
    b'{"url":"http://a:1","weight":1,"session":""}',
    b'{"url":"file:///etc/passwd","weight":1,"session":"s"}',
    b'{"url":"http://user:secret@a:1","weight":1,"session":"s"}',
    b'{"url":"http://a:99999","weight":1,"session":"s"}',
    b'{"url":"http://a:0","weight":1,"session":"s"}',
    b'{"url":"http://a:1/path?x","weight":1,"session":"s"}',
    b'{"url":"http://a\\r\\nX-Evil: 1:1","weight":1,"session":"s"}',
    b'{"url":"http://a b:1","weight":1,"session":"s"}',
    b'{"url":"http://[::1:1","weight":1,"session":"s"}',
    b'{"url":"http://' + b"a" * 300 + b':1","weight":1,"session":"s"}',
    b'{"url":"http://a:1","weight":1,"session":"s","pad":"' + b"x" * (1 << 20) + b'"}',
]


@pytest.mark.fault("M7")
@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_an_invalid_record_is_ignored_and_counted_once(value: bytes) -> None:
    entries = (m.Entry(PREFIX + "a", value, 3, 0), record("b", 4))
    state = standing(*entries)
    assert ids(state) == ["b", "self"]
    assert learn(state, m.Listed(entries, 11)).ignored_total == 1


@pytest.mark.fault("M7")
@pytest.mark.parametrize("name", ["", "x/y", "../x", "-x", "ü", "x" * 65, "a b", "a\n", "\\xff"])
def test_an_invalid_node_id_is_ignored(name: str) -> None:
    state = standing(record(name, url="http://h:1"))
    assert (ids(state), state.ignored_total) == (["self"], 1)


def test_fields_of_later_versions_are_ignored() -> None:
    assert ids(standing(record("a", socket="/run/quiver.sock", zone=[1, {"x": None}]))) == ["a", "self"]


@pytest.mark.fault("M7")
@given(st.binary(max_size=200))
def test_reading_a_record_never_fails(value: bytes) -> None:
    m.read("a", m.Entry(PREFIX + "a", value, 1, 0))


@pytest.mark.fault("M7")
def test_of_ten_thousand_keys_the_ring_keeps_a_bounded_number_and_self() -> None:
    many = tuple(record(f"n{i:05}", url="http://h:1") for i in range(10_000))
    state = standing(*many)
    assert len(state.ring.members) == MEMBERS_MAX
    assert "self" in ids(state)
    assert state.ignored_total == 10_000 - (MEMBERS_MAX - 1)
    back = learn(state, m.Lost(), m.Connected(), m.Listed((), 20), now=100.0)
    assert len(back.ring.members) == MEMBERS_MAX


@given(st.integers(0, 10**6), st.floats(0, 0.999), st.floats(1, 100))
def test_the_pause_between_retries_is_short_enough_to_keep_the_lease(
    attempt: int, draw: float, ttl_seconds: float
) -> None:
    pause = m.backoff_seconds(attempt, ttl_seconds, draw)
    assert 0 < pause <= ttl_seconds / 3
    assert pause <= 0.1 * 2 ** min(attempt, 10)


def test_a_daemon_without_a_connection_waits_for_its_shell() -> None:
    assert m.step(begin(), m.Tick(), 5.0)[1] == m.Wait(math.inf)
