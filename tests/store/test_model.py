"""The store against a dictionary: whatever is done to it, in whatever order."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from quiver.digest import Digest
from quiver.errors import Corrupt, NotFound, OverCapacity
from quiver.store import Kind, Store, idle_of, put_with_room, reserve_with_room
from quiver.store.inventory import file_of
from tests.store.test_store import damage, idle, shard_of

CAPACITY = 10_000
numbers = st.integers(0, 9)


class StoreModel(RuleBasedStateMachine):
    """A store of at most ten shards of different sizes, of which not all fit."""

    shared: ClassVar[bool] = False
    reservations = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="quiver-model-"))
        self.held: dict[Digest, bytes] = {}
        self.idle: set[Digest] = set()
        self.pinned: set[Digest] = set()
        self.maps: list[tuple[memoryview, bytes]] = []
        self.writing: list[tuple[contextlib.ExitStack, object, Digest, bytes]] = []

    @initialize()
    def begin(self) -> None:
        self.open()

    def open(self) -> None:
        self.store = Store.open(self.root, CAPACITY, shared=self.shared)
        self.decide = idle_of(self.store, lambda digest: True if digest in self.pinned else None)

    def shard(self, number: int) -> tuple[Digest, bytes]:
        return shard_of(number, 400 + number * 400)

    def reserved_bytes(self) -> int:
        return sum(len(data) for _, _, _, data in self.writing)

    def room_for(self, size: int) -> bool:
        """Whether the store may take so much; then what it dropped is found by looking."""
        free = CAPACITY - sum(map(len, self.held.values())) - self.reserved_bytes()
        evictable = sum(len(self.held[digest]) for digest in self.idle - self.pinned)
        return size <= free + evictable

    def forget_evicted(self) -> None:
        gone = {digest for digest in self.held if not file_of(self.root, Kind.SHARD, digest).exists()}
        assert gone <= self.idle - self.pinned, "only what is idle and not in use is evicted"
        for digest in gone:
            del self.held[digest]
        self.idle -= gone

    @rule(number=numbers)
    def put(self, number: int) -> None:
        digest, data = self.shard(number)
        roomy = self.room_for(len(data))
        try:
            put_with_room(self.store, Kind.SHARD, digest, data, self.decide)
        except OverCapacity:
            assert not roomy
            self.forget_evicted()
            return
        assert roomy
        self.held.setdefault(digest, data)
        self.idle.discard(digest)
        self.forget_evicted()

    @rule(number=numbers)
    def reserve(self, number: int) -> None:
        digest, data = self.shard(number)
        roomy = self.room_for(len(data))
        stack = contextlib.ExitStack()
        try:
            writing = stack.enter_context(reserve_with_room(self.store, Kind.SHARD, digest, len(data), self.decide))
        except OverCapacity:
            assert not roomy
            return
        finally:
            self.forget_evicted()
        writing.write(data[: len(data) // 2])
        self.writing.append((stack, writing, digest, data))

    @rule(commit=st.booleans())
    def finish(self, commit: bool) -> None:
        if not self.writing:
            return
        stack, writing, digest, data = self.writing.pop(0)
        with stack:
            if commit:
                writing.write(data[len(data) // 2 :])  # type: ignore[attr-defined]
                writing.commit()  # type: ignore[attr-defined]
                self.held[digest] = data
                self.idle.discard(digest)

    @rule(number=numbers)
    def read(self, number: int) -> None:
        digest, data = self.shard(number)
        try:
            view = self.store.load(digest, len(data))
        except NotFound:
            assert digest not in self.held
            return
        assert digest in self.held
        self.idle.discard(digest)
        self.maps.append((memoryview(view), data))

    @rule(number=numbers)
    def drop(self, number: int) -> None:
        digest, _ = self.shard(number)
        self.store.drop(Kind.SHARD, digest)
        self.held.pop(digest, None)
        self.idle.discard(digest)

    @rule(number=numbers, how=st.sampled_from(["flipped bit", "truncated", "another shard"]))
    def rot(self, number: int, how: str) -> None:
        digest, _ = self.shard(number)
        if digest not in self.held:
            return
        self.maps = [(view, data) for view, data in self.maps if data != self.held[digest]]  # rotted under the map
        damage(self.store, digest, how)
        try:
            self.store.check(digest)
        except Corrupt:
            del self.held[digest]
            self.idle.discard(digest)
        else:
            raise AssertionError("rot was not found")

    @rule(number=numbers)
    def grow_old(self, number: int) -> None:
        digest, _ = self.shard(number)
        if digest in self.held:
            idle(self.store, digest)
            self.idle.add(digest)
            touched = getattr(self.store.inventory, "_touched", {})
            touched.pop(digest, None)

    @rule(number=numbers)
    def pin_or_unpin(self, number: int) -> None:
        self.pinned.symmetric_difference_update({self.shard(number)[0]})

    @rule()
    def reopen(self) -> None:
        for stack, *_ in self.writing:
            stack.close()
        self.writing.clear()
        self.store.close()
        self.open()
        if not self.shared:
            self.idle = {held.digest for held in self.store.inventory.held(Kind.SHARD)} & self.idle
            for digest in self.idle:
                idle(self.store, digest)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        if not hasattr(self, "store"):
            return
        held = {item.digest: item.size_bytes for item in self.store.inventory.held(Kind.SHARD)}
        assert held == {digest: len(data) for digest, data in self.held.items()}
        assert self.store.resident_bytes() == sum(held.values()) + self.reserved_bytes() <= CAPACITY
        assert len(list((self.root / "tmp").iterdir())) == len(self.writing)

    @invariant()
    def what_was_mapped_stays_whole(self) -> None:
        for view, data in self.maps[-5:]:
            assert bytes(view) == data

    def teardown(self) -> None:
        for stack, *_ in self.writing:
            stack.close()
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.root)


class SharedStoreModel(StoreModel):
    shared = True


TestOwned = StoreModel.TestCase
TestShared = SharedStoreModel.TestCase
TestOwned.settings = TestShared.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
