"""The table of a store's files beside a dictionary."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quiver.digest import Digest
from quiver.store import table as table_module
from quiver.store.table import FileTable

digests = st.integers(0, 9).map(lambda number: Digest(bytes([number]) * 32))


class Tables(RuleBasedStateMachine):
    """Every file is in its own row, whatever was removed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = FileTable()
        self.held: dict[Digest, tuple[int, float]] = {}
        self.stamps: dict[Digest, int] = {}
        self.stamps_before: set[int] = set()

    @rule(digest=digests, size=st.integers(0, 99), used=st.floats(0, 99))
    def set(self, digest: Digest, size: int, used: float) -> None:
        self.table.set(digest, size, used)
        self.held[digest] = size, used

    @rule(digest=digests, used=st.floats(0, 99))
    def touch(self, digest: Digest, used: float) -> None:
        self.table.touch(digest, used)
        if digest in self.held:
            self.held[digest] = self.held[digest][0], used

    @rule(digest=digests)
    def remove(self, digest: Digest) -> None:
        if digest in self.held:
            assert self.table.remove(digest) == self.held.pop(digest)[0]
            self.stamps_before.add(self.stamps.pop(digest))

    @invariant()
    def is_as_the_dictionary(self) -> None:
        listing = self.table.listing()
        assert {name: self.held[name] for name in listing.names} == self.held
        assert len(listing.names) == len(self.table) == len(self.held)
        assert [row.tobytes() for row in listing.digests] == listing.names
        assert list(zip(listing.sizes.tolist(), listing.used.tolist(), strict=True)) == [
            self.held[name] for name in listing.names
        ]
        assert {file.digest: (file.size_bytes, file.used) for file in self.table.files()} == self.held
        assert all(self.table.size(digest) == size for digest, (size, _) in self.held.items())
        for name, stamp in zip(listing.names, listing.stamps.tolist(), strict=True):
            assert self.stamps.setdefault(name, stamp) == stamp
            assert stamp not in self.stamps_before, "a file that came again is another one"


TestTables = Tables.TestCase


def test_a_table_grows() -> None:
    table = FileTable()
    count = 2 * table_module.ROWS_FIRST + 1
    names = [Digest(number.to_bytes(32, "big")) for number in range(count)]
    for number, name in enumerate(names):
        table.set(name, number, float(number))
    listing = table.listing()
    assert listing.names == names
    assert np.array_equal(listing.sizes, np.arange(count))
    assert np.array_equal(listing.used, np.arange(count, dtype=np.float64))
    assert len(set(listing.stamps.tolist())) == count
    assert table.size(Digest(b"?" * 32)) == 0
