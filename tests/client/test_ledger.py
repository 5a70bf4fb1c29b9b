"""The ledger: it preserves any order, and tells torn tails, flipped bits, foreign and forged files from that."""

from __future__ import annotations

import contextlib
import io
import os
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.digest import Digest
from quiver.substitution import Ints, Mask, Order, View, permutation
from quiver_client.loader.ledger.batch_encoding import decode_batch, encode_batch, skipped, varint
from quiver_client.loader.ledger.files import LedgerReader, LedgerWriter
from quiver_client.loader.ledger.format import CHUNK_BYTES, FrameKind, Run, encode_batches, parse

RUN = Run(
    dataset=str(Digest.of(b"a dataset")), seed=3, shuffle=True, rank=1, world_size=4, batch_size=256, drop_last=False
)
Segments = list[tuple[Mask | None, list[bytes]]]


def epoch_of(samples: int, shard_count: int, seed: int) -> Order:
    """A rank whose share is a whole dataset of shards of equal size."""
    return Order((permutation(samples, seed, 0) * shard_count // samples).astype(np.int64), shard_count)


def view_of(resident: Mask) -> View:
    return View(resident, np.zeros(len(resident), np.uint8), np.arange(len(resident), dtype=np.int64))


def written(path: Path, *segments: tuple[int, Mask | None, int, list[bytes]], run: Run = RUN) -> Path:
    """A closed ledger of segments: epoch, done, start, batches."""
    writer = LedgerWriter(path, run, resume=False)
    with contextlib.closing(writer):
        for epoch, done, batches, records in segments:
            writer.begin(epoch, done, batches)
            for record in records:
                writer.batch(record)
    return path


def records_of(reader: LedgerReader, epoch: int) -> list[bytes]:
    """The records of an epoch that was dealt once."""
    deals = reader.batches(epoch)
    assert [done is None for done, _ in deals] in ([], [True])
    return deals[0][1] if deals else []


def assert_same(found: Segments, expected: Segments) -> None:
    assert [records for _, records in found] == [records for _, records in expected]
    for (done, _), (wanted, _) in zip(found, expected, strict=True):
        assert (done is None) == (wanted is None)
        assert done is None or wanted is None or (done.dtype == np.bool_ and done.tolist() == wanted.tolist())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.ledger"


# ---- A batch as a record.


@st.composite
def batches(draw: st.DrawFn) -> Iterator[tuple[Order, Ints]]:
    """Batches of an epoch under an adversary that decides before each what is resident; each is taken when consumed."""
    shard_count = draw(st.integers(1, 40))
    samples = draw(st.integers(shard_count, 1500))
    rng = np.random.Generator(np.random.PCG64(draw(st.integers(0, 2**32))))
    order = Order(rng.integers(0, shard_count, samples), shard_count)
    size = draw(st.integers(1, 300))
    lookahead = draw(st.none() | st.integers(1, 2 * samples))
    share = draw(st.floats(0, 1))

    def taken() -> Iterator[tuple[Order, Ints]]:
        while len(order):
            view = View(rng.random(shard_count) < share, rng.integers(0, 3, shard_count).astype(np.uint8), order.left)
            entries = order.substituted(size, view, lookahead) if rng.random() < 0.9 else None
            if entries is None:
                entries = order.completed(size, view)
            yield order, entries
            order.take(entries)

    return taken()


@settings(max_examples=150, deadline=None)
@given(batches())
def test_any_batch_survives_an_encoding_no_longer_than_its_counts(
    taken: Iterator[tuple[Order, Ints]],
) -> None:
    for order, entries in taken:
        record = encode_batch(order, entries, 300)
        assert taken_by(order, record, 300) == entries.tolist()
        assert len(record) <= 2 + 4 * len(entries)
        if entries.tolist() == order.plain(len(entries)).tolist():
            assert len(record) <= 2
        passed_over, was_skipped = decode_batch(order, skipped(record), 300)
        assert was_skipped
        assert passed_over.tolist() == entries.tolist()


def taken_by(order: Order, record: bytes, batch_size: int = RUN.batch_size) -> list[int]:
    entries, was_skipped = decode_batch(order, record, batch_size)
    assert not was_skipped
    return entries.tolist()  # type: ignore[no-any-return]


def next_ones(order: Order, entries: Ints) -> bool:
    """Whether ``order`` could have drawn this batch."""
    pending = order.plain(len(order))
    shards = set(order.shards[entries].tolist())
    last = {shard: max(entries[order.shards[entries] == shard]) for shard in shards}
    wanted = [entry for entry in pending.tolist() if entry <= last.get(order.shards[entry], -1)]
    return wanted == entries.tolist()


@st.composite
def half_taken(draw: st.DrawFn) -> Order:
    order = epoch_of(draw(st.integers(20, 300)), draw(st.integers(1, 12)), draw(st.integers(0, 99)))
    order.take(order.completed(draw(st.integers(1, 200)), view_of(np.arange(len(order.left)) % 2 == 0)))
    return order


@settings(max_examples=500, deadline=None)
@given(half_taken(), st.lists(st.integers(0, 40), max_size=12) | st.none(), st.binary(max_size=40))
def test_any_bytes_are_a_batch_that_the_order_could_have_drawn_or_are_refused(
    order: Order, numbers: list[int] | None, junk: bytes
) -> None:
    record = junk if numbers is None else b"".join(map(varint, numbers))
    try:
        entries, _ = decode_batch(order, record, 30)
    except ValueError:
        return
    assert next_ones(order, entries)
    assert len(entries) <= 30
    before = len(order)
    order.take(entries)
    assert len(order) == before - len(entries)


VAST = b"\xff" * 8 + b"\x7f"  # the largest number there is


@pytest.mark.parametrize(
    ("record", "why"),
    [
        pytest.param(b"", "does not end", id="empty"),
        pytest.param(b"\x80" * 9, "does not end", id="endless"),
        pytest.param(bytes([1 << 2]), "9 samples does not fit 8", id="more-than-is-pending"),
        pytest.param(bytes([11 << 2]), "-1 samples", id="fewer-than-none"),
        pytest.param(VAST, "samples does not fit", id="far-fewer-than-none"),
        pytest.param(bytes([9 << 2, 0]), "1 bytes follow", id="more-behind"),
        pytest.param(bytes([9 << 2 | 2, 4, 0]), "not one of 4", id="no-such-shard"),
        pytest.param(bytes([8 << 2 | 2, 3, 0, 0, 0]), "not one of 4", id="no-shard-after-the-last"),
        pytest.param(bytes([7 << 2 | 2, 0, 2]), "3 samples does not fit", id="more-than-the-shard-has"),
        pytest.param(bytes([8 << 2 | 2, 0, 0]), "2 samples does not fit", id="fewer-than-it-says"),
        pytest.param(bytes([9 << 2 | 2]) + VAST + b"\0" + VAST + b"\0", "not one of 4", id="shards-overflow"),
        pytest.param(bytes([9 << 2 | 2, 0]) + VAST, "does not fit", id="counts-overflow"),
        pytest.param(bytes([9 << 2 | 2, 0]) + VAST + b"\0" + VAST, "does not fit", id="their-sum-overflows"),
        pytest.param(bytes([9 << 2 | 2, 1]), "without its count", id="half-a-pair"),
        pytest.param(bytes([9 << 2 | 2, 0x80]), "does not end", id="half-a-number"),
    ],
)
def test_an_encoded_batch_that_does_not_fit_is_refused_with_the_reason(record: bytes, why: str) -> None:
    order = Order(np.array([0, 1, 2, 3, 0, 1, 2, 3]), 4)
    with pytest.raises(ValueError, match=why):
        decode_batch(order, record, 10)


@pytest.mark.parametrize("entries", [[4], [1, 0], [0, 5], [0, 0]])
def test_entries_that_are_no_batch_of_the_order_are_not_encoded(entries: list[int]) -> None:
    order = Order(np.array([0, 1, 2, 3, 0, 1, 2, 3]), 4)
    with pytest.raises(ValueError, match="next entries"):
        encode_batch(order, np.array(entries), 8)


def test_a_batch_that_is_larger_than_the_batch_size_is_not_encoded() -> None:
    order = Order(np.array([0, 1, 2, 3, 0, 1, 2, 3]), 4)
    with pytest.raises(ValueError, match="3 samples is larger than batch_size=2"):
        encode_batch(order, np.arange(3), 2)


def test_a_batch_far_from_the_front_survives() -> None:
    order = Order(np.concatenate([np.zeros(50_000, np.int64), np.arange(1, 257)]), 257)
    entries = np.arange(50_000, 50_256)
    assert taken_by(order, encode_batch(order, entries, 256)) == entries.tolist()


def test_a_batch_is_one_number_or_two_for_each_shard() -> None:
    order = epoch_of(20_000, 2_000, 7)
    few = view_of(np.arange(2_000) % 25 == 0)
    plain = order.plain(256)
    drained = order.substituted(256, few, None)
    assert drained is not None
    shards = len(np.unique(order.shards[drained]))
    assert shards < 40
    assert encode_batch(order, plain, 256) == b"\0"
    assert encode_batch(order, plain[:-1], 256) == bytes([1 << 2])
    assert encode_batch(order, drained, 256)[:1] == b"\2"
    assert 1 + 2 * shards <= len(encode_batch(order, drained, 256)) <= 1 + 3 * shards


# ---- The size.


def bits_a_sample(path: Path, order: Order, size: int, batch: Callable[[int], Ints]) -> float:
    samples = len(order)
    writer = LedgerWriter(path, RUN, resume=False)
    with contextlib.closing(writer):
        writer.begin(0, None, 0)
        for number in range(-(-samples // size)):
            entries = batch(number)
            writer.batch(encode_batch(order, entries, RUN.batch_size))
            order.take(entries)
    return path.stat().st_size * 8 / samples


def test_the_plain_order_costs_next_to_nothing(path: Path) -> None:
    order = epoch_of(100_000, 400, 1)
    assert bits_a_sample(path, order, 256, lambda _: order.plain(256)) < 0.05


def test_the_plain_order_costs_a_fifth_of_a_bit_where_every_batch_is_flushed(path: Path) -> None:
    order = epoch_of(100_000, 400, 1)
    now = iter(range(10**9))
    writer = LedgerWriter(path, RUN, resume=False, clock=lambda: float(next(now)))
    with contextlib.closing(writer):
        writer.begin(0, None, 0)
        before = path.stat().st_size
        for _ in range(300):
            writer.batch(encode_batch(order, order.plain(256), 256))
        assert (path.stat().st_size - before) * 8 / (300 * 256) < 0.2


def test_draining_a_few_shards_costs_under_half_a_bit(path: Path) -> None:
    order = epoch_of(100_000, 400, 1)
    rng = np.random.Generator(np.random.PCG64(0))

    def batch(number: int) -> Ints:
        view = view_of(rng.random(400) < 0.2)
        entries = order.substituted(256, view, None)
        return order.completed(256, view) if entries is None else entries

    assert bits_a_sample(path, order, 256, batch) < 0.5


def test_random_residency_within_a_lookahead_costs_under_eight_bits(path: Path) -> None:
    order = epoch_of(100_000, 4500, 1)
    rng = np.random.Generator(np.random.PCG64(0))
    substituted = 0

    def batch(number: int) -> Ints:
        nonlocal substituted
        view = view_of(rng.random(4500) < 0.2)
        entries = order.substituted(256, view, 2560)
        substituted += entries is not None
        return order.completed(256, view) if entries is None else entries

    bits = bits_a_sample(path, order, 256, batch)
    assert bits < 8
    assert substituted > 300
    assert bits > 2  # or the residency was not random


# ---- The file.


def test_what_was_written_is_read_epoch_by_epoch(path: Path) -> None:
    done = np.arange(1000) % 3 == 0
    few = np.arange(9) == 4  # of a length that is no multiple of eight
    again = [b"plain"] * 10_000
    reader = LedgerReader(
        written(path, (0, None, 0, [b"a", b"", b"b" * 300]), (2, done, 0, again), (7, few, 0, []), (8, None, 0, [])),
        RUN,
    )
    assert reader.epochs == (0, 2, 7, 8)
    assert_same(reader.batches(0), [(None, [b"a", b"", b"b" * 300])])
    assert_same(reader.batches(2), [(done, again)])
    assert_same(reader.batches(7), [(few, [])])
    assert_same(reader.batches(8), [(None, [])])
    assert reader.batches(1) == []
    assert "4 epochs" in repr(reader)
    assert path.stat().st_size < 1500


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.sampled_from([b"a", b"b", b"\0\0", b"long" * 40]), max_size=12), max_size=5), st.data())
def test_any_batches_of_any_number_of_processes_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, epochs: list[list[bytes]], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("lives") / "run.ledger"
    written(path)
    for epoch, records in enumerate(epochs):
        cut = data.draw(st.integers(0, len(records)))
        for start, part in ((0, records[:cut]), (cut, records[cut:])):
            writer = LedgerWriter(path, RUN, resume=True)
            with contextlib.closing(writer):
                writer.begin(epoch, None, start)
                for record in part:
                    writer.batch(record)
    reader = LedgerReader(path, RUN)
    assert [records_of(reader, epoch) for epoch in range(len(epochs))] == epochs


def test_a_real_epoch_is_decoded_from_its_file(path: Path) -> None:
    first, second = epoch_of(5_000, 50, 2), epoch_of(5_000, 50, 2)
    rng = np.random.Generator(np.random.PCG64(5))
    took: list[list[int]] = []

    def batch(number: int) -> Ints:
        took.append(first.completed(64, view_of(rng.random(50) < 0.2)).tolist())
        return np.array(took[-1])

    bits_a_sample(path, first, 64, batch)
    for record, entries in zip(records_of(LedgerReader(path, RUN), 0), took, strict=True):
        assert taken_by(second, record) == entries
        second.take(np.array(entries))
    assert len(second) == 0


def test_batches_are_flushed_after_a_second_or_64_kib(path: Path) -> None:
    now = [0.0]
    writer = LedgerWriter(path, RUN, resume=False, clock=lambda: now[0])
    with contextlib.closing(writer):
        writer.begin(0, None, 0)
        writer.batch(b"a")
        assert records_of(LedgerReader(path, RUN), 0) == []
        now[0] = 1.5
        writer.batch(b"b")
        assert records_of(LedgerReader(path, RUN), 0) == [b"a", b"b"]
        writer.batch(b"c" * (64 << 10))
        assert len(records_of(LedgerReader(path, RUN), 0)) == 3
        writer.batch(b"d")
        writer.batch(b"d")
        assert "bytes" in repr(writer)
        writer.flush()
        assert records_of(LedgerReader(path, RUN), 0)[3:] == [b"d", b"d"]
        writer.batch(b"d")
        writer.begin(1, None, 0)
        assert records_of(LedgerReader(path, RUN), 0)[3:] == [b"d", b"d", b"d"]
    writer.close()
    assert "closed" in repr(writer)


def test_a_disk_that_fills_up_and_has_space_again_gets_every_byte_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Grudging(io.FileIO):
        full = False

        def write(self, data: Any, /) -> int:
            if self.full:
                raise OSError(28, "No space left on device")
            self.full = True
            return super().write(bytes(data)[:3])

    written(path)
    end = parse(path.read_bytes(), RUN).end
    writer = LedgerWriter(path, RUN, resume=True)
    writer._file.close()
    grudging = Grudging(path, "r+")
    grudging.seek(end)
    writer._file = grudging
    with contextlib.closing(writer):
        with pytest.raises(OSError, match="No space"):
            writer.begin(0, None, 0)
        for record in (b"abc", b"def"):
            grudging.full = False
            writer.batch(record)
            with pytest.raises(OSError, match="No space"):
                writer.flush()
        monkeypatch.setattr(Grudging, "write", io.FileIO.write)
    assert records_of(LedgerReader(path, RUN), 0) == [b"abc", b"def"]


def test_batches_of_any_size_share_frames_of_a_bounded_size(path: Path) -> None:
    rng = np.random.Generator(np.random.PCG64(0))
    sizes = [0, 1, 127, 128, 300, CHUNK_BYTES - 2, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES, 200]
    records = [rng.bytes(size) for size in [*sizes, *[0] * 5000, *[1] * 5000, *[128] * 2000]]
    records += [bytes(size) for size in sizes]
    written(path, (0, None, 0, records))
    assert records_of(LedgerReader(path, RUN), 0) == records
    (segment,) = parse(path.read_bytes(), RUN).segments
    assert 10 < len(segment.frames) < 40
    assert sum(kind is FrameKind.BATCH for kind, _ in segment.frames) >= 3  # such as would not fit, or not shrink


def test_a_new_ledger_replaces_an_old_one_and_leaves_nothing_beside_it(path: Path) -> None:
    written(path, (0, None, 0, [b"old"]), run=msgspec.structs.replace(RUN, seed=99))
    written(path, (5, None, 0, [b"new"]))
    assert LedgerReader(path, RUN).epochs == (5,)
    assert list(path.parent.iterdir()) == [path]


def test_appending_to_a_ledger_that_does_not_exist_creates_one(path: Path) -> None:
    LedgerWriter(path, RUN, resume=True).close()
    assert LedgerReader(path, RUN).epochs == ()


@pytest.mark.fault("C1")
def test_where_a_segment_begins_and_which_ledger_it_is_are_synced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power cut could leave an older segment, or an older ledger, whose batches would count."""
    synced: list[tuple[str, int]] = []
    sync = os.fsync

    def recorded(fd: int) -> None:
        synced.append((str(Path(f"/proc/self/fd/{fd}").readlink()), os.fstat(fd).st_size))
        sync(fd)

    monkeypatch.setattr(os, "fsync", recorded)
    writer = LedgerWriter(path, RUN, resume=False)
    with contextlib.closing(writer):
        assert synced[-1][0] == str(path.parent)
        for epoch in range(2):
            writer.begin(epoch, None, 0)
            assert synced[-1] == (str(path), path.stat().st_size)
            writer.batch(b"a")


@pytest.mark.fault("C1")
def test_what_a_process_that_was_killed_while_it_made_a_ledger_left_is_written_over(path: Path) -> None:
    path.with_name(f".{path.name}.tmp").write_bytes(b"half of a header, or more than that" * 100)
    LedgerWriter(path, RUN, resume=False).close()
    assert list(path.parent.iterdir()) == [path]
    assert LedgerReader(path, RUN).epochs == ()


def test_a_batch_before_any_segment_is_refused(path: Path) -> None:
    writer = LedgerWriter(path, RUN, resume=False)
    with contextlib.closing(writer), pytest.raises(ValueError, match="begin"):
        writer.batch(b"a")


# ---- What a killed process and a bad disk leave.

RECORDS = [b"one", b"two", b"two", b"two", b"three" * 30, b"four"]


def torn_and_whole(path: Path) -> tuple[bytes, list[int]]:
    """A ledger that was not closed, and the size of the file after each batch."""
    writer = LedgerWriter(path, RUN, resume=False)
    with contextlib.closing(writer):
        writer.begin(0, None, 0)
        whole = [path.stat().st_size] * 2
        for record in RECORDS:
            writer.batch(record)
            writer.flush()
            whole.append(path.stat().st_size)
        data = path.read_bytes()
    assert data == path.read_bytes()[: len(data)]
    return data, whole[1:]


@pytest.mark.parametrize("zeros", [0, 300])
def test_a_tail_torn_at_any_byte_costs_the_torn_batch_alone(path: Path, zeros: int) -> None:
    data, whole = torn_and_whole(path)
    start = data.index(b"}") + 1 + 4
    for cut in range(start, len(data) + 1):
        path.write_bytes(data[:cut] + bytes(zeros))
        kept = sum(end <= cut for end in whole[1:])
        assert records_of(LedgerReader(path, RUN), 0) == RECORDS[:kept]
        writer = LedgerWriter(path, RUN, resume=True)
        with contextlib.closing(writer):
            writer.begin(0, None, kept)
            writer.batch(b"more")
        assert records_of(LedgerReader(path, RUN), 0) == [*RECORDS[:kept], b"more"]


def test_batches_that_were_flushed_together_are_torn_together(path: Path) -> None:
    writer = LedgerWriter(path, RUN, resume=False)
    with contextlib.closing(writer):
        writer.begin(0, None, 0)
        sizes = []
        for _ in range(3):
            for record in RECORDS:
                writer.batch(record)
            writer.flush()
            sizes.append(path.stat().st_size)
    data = path.read_bytes()
    for cut in range(sizes[0], sizes[2] + 1):
        path.write_bytes(data[:cut])
        kept = sum(end <= cut for end in sizes)
        assert records_of(LedgerReader(path, RUN), 0) == RECORDS * kept
        writer = LedgerWriter(path, RUN, resume=True)
        with contextlib.closing(writer):
            writer.begin(0, None, kept * len(RECORDS))
            writer.batch(b"more")
        assert records_of(LedgerReader(path, RUN), 0) == [*RECORDS * kept, b"more"]


def test_a_header_torn_at_any_byte_is_no_ledger(path: Path) -> None:
    data, _ = torn_and_whole(path)
    for cut in range(data.index(b"}") + 1 + 4):
        path.write_bytes(data[:cut])
        with pytest.raises(ValueError, match="replay="):
            LedgerReader(path, RUN)


def test_no_flipped_bit_of_a_closed_ledger_changes_what_is_replayed(path: Path) -> None:
    written(path, (0, None, 0, RECORDS), (1, np.arange(20) % 2 == 0, 0, [b"x"]))
    data = path.read_bytes()
    survived = 0
    for at in range(len(data)):
        for bit in range(8):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            try:
                reader = LedgerReader(path, RUN)
            except ValueError as error:
                assert f"replay={str(path)!r}" in str(error)  # noqa: PT017 - eight bits of every byte
                continue
            survived += 1
            assert records_of(reader, 0) == RECORDS
            assert reader.batches(1)[0][1] == [b"x"]
            assert len(data) - at <= 13  # only the mark that it was closed
    assert survived


def test_a_flipped_bit_of_an_open_ledger_shortens_it_at_most(path: Path) -> None:
    data, _ = torn_and_whole(path)
    refused = 0
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        try:
            found = records_of(LedgerReader(path, RUN), 0)
        except ValueError:
            refused += 1
            continue
        assert found == RECORDS[: len(found)]
    assert refused > len(data) // 2


def test_damage_in_the_middle_is_refused_by_reader_and_writer_with_its_place(path: Path) -> None:
    data, whole = torn_and_whole(path)
    at = whole[1] - 1
    damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=rf"replay=.*damaged at byte {whole[0]}"):
        LedgerReader(path, RUN)
    with pytest.raises(ValueError, match=rf"ledger=.*damaged at byte {whole[0]}"):
        LedgerWriter(path, RUN, resume=True)
    assert path.read_bytes() == damaged


def test_a_frame_that_is_missing_or_in_another_place_is_damage(path: Path) -> None:
    data, whole = torn_and_whole(path)
    first, second = data[whole[0] : whole[1]], data[whole[1] : whole[2]]
    for middle in (second, second + first, first + first + second):
        path.write_bytes(data[: whole[0]] + middle + data[whole[2] :])
        with pytest.raises(ValueError, match=f"damaged at byte {whole[0] if middle[1:4] == b'two' else whole[1]}"):
            LedgerReader(path, RUN)


def test_a_length_that_does_not_end_is_damage_and_no_torn_tail(path: Path) -> None:
    data, _ = torn_and_whole(path)
    path.write_bytes(data + b"\xff" * 8)
    assert records_of(LedgerReader(path, RUN), 0) == RECORDS
    path.write_bytes(data + b"\xff" * 9)
    with pytest.raises(ValueError, match=r"replay=.*does not end"):
        LedgerReader(path, RUN)


def test_a_reader_of_a_ledger_that_changes_has_what_it_checked(path: Path) -> None:
    reader = LedgerReader(written(path, (0, None, 0, RECORDS)), RUN)
    written(path, (0, np.ones(3, bool), 0, RECORDS[:2]))
    assert records_of(reader, 0) == RECORDS
    written(path)
    assert records_of(reader, 0) == RECORDS
    path.unlink()
    assert records_of(reader, 0) == RECORDS


def forged(path: Path, *frames: tuple[FrameKind, bytes]) -> Path:
    """A ledger of forged frames, with correct CRCs."""
    writer = LedgerWriter(path, RUN, resume=False)
    with contextlib.closing(writer):
        for kind, body in frames:
            writer._append(kind, body)
    return path


def deflated(*batches: bytes) -> bytes:
    kind, body = encode_batches([*batches])
    assert kind is FrameKind.BATCHES
    return body


BEGIN = (FrameKind.SEGMENT, b"\0\0")


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([(FrameKind.BATCH, b"record")], id="batch-outside"),
        pytest.param([(FrameKind.BATCHES, deflated(b"x", b"y"))], id="batches-outside"),
        pytest.param([BEGIN, (FrameKind.BATCHES, b"")], id="batches-empty"),
        pytest.param([BEGIN, (FrameKind.BATCHES, b"\1\2\3")], id="batches-not-deflated"),
        pytest.param([BEGIN, (FrameKind.BATCHES, deflated(b"x", b"y")[:-1])], id="batches-deflated-in-part"),
        pytest.param([BEGIN, (FrameKind.BATCHES, deflated(b"x", b"y") + b"!")], id="batches-and-more"),
        pytest.param([BEGIN, (FrameKind.BATCHES, zlib.compress(b"\2x"))], id="batches-that-end-within-one"),
        pytest.param([BEGIN, (FrameKind.BATCHES, zlib.compress(b"\1x\x80"))], id="batches-that-end-within-a-length"),
        pytest.param([BEGIN, (FrameKind.BATCHES, zlib.compress(VAST))], id="batches-vast"),
        pytest.param([(FrameKind.SEGMENT, b"")], id="begin-empty"),
        pytest.param([(FrameKind.SEGMENT, b"\0\0more")], id="begin-more"),
        pytest.param([(FrameKind.SEGMENT, b"\0\0\1\0")], id="begin-mask-not-deflated"),
        pytest.param([(FrameKind.SEGMENT, b"\0\0" + VAST)], id="begin-vast-mask"),
        pytest.param([(FrameKind.SEGMENT, b"\0\0" + VAST + zlib.compress(b"\0"))], id="begin-vast-deflated-mask"),
        pytest.param([(FrameKind.SEGMENT, b"\0\0\1" + zlib.compress(b"\0\0"))], id="begin-mask-too-long"),
        pytest.param([BEGIN, (FrameKind.END, b"complete"), BEGIN], id="more-behind-the-end"),
        pytest.param([BEGIN, (FrameKind.END, b"complet!")], id="another-end"),
    ],
)
def test_frames_that_make_no_sense_are_refused(path: Path, frames: list[tuple[FrameKind, bytes]]) -> None:
    forged(path, *frames)
    with pytest.raises(ValueError, match="replay="):
        LedgerReader(path, RUN)


def test_a_frame_that_inflates_to_a_gigabyte_costs_nothing(path: Path) -> None:
    packer = zlib.compressobj(9)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(1024)) + packer.flush()
    forged(path, BEGIN, (FrameKind.BATCHES, bomb))
    tracemalloc.start()
    with pytest.raises(ValueError, match="too much"):
        LedgerReader(path, RUN)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 << 20


# ---- Whose ledger it is.

OTHERS: list[tuple[str, Any]] = [
    ("dataset", str(Digest.of(b"another"))),
    ("seed", 4),
    ("shuffle", False),
    ("rank", 2),
    ("world_size", 5),
    ("batch_size", 16),
    ("drop_last", True),
    ("block_shards", 8),
]


def test_every_field_of_a_run_is_compared() -> None:
    assert [name for name, _ in OTHERS] == [*Run.__struct_fields__]


@pytest.mark.parametrize(("name", "value"), OTHERS)
def test_a_ledger_of_another_run_is_refused_with_what_differs(path: Path, name: str, value: Any) -> None:
    written(path, (0, None, 0, RECORDS))
    before = path.read_bytes()
    other = msgspec.structs.replace(RUN, **{name: value})
    with pytest.raises(ValueError, match=f"replay=.*of another {name}: .* there, .* in this run"):
        LedgerReader(path, other)
    with pytest.raises(ValueError, match=f"ledger=.*of another {name}"):
        LedgerWriter(path, other, resume=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param(b"", "not a ledger", id="empty"),
        pytest.param(b"\x89PNG" * 100, "not a ledger", id="junk"),
        pytest.param(b"qvledger\3\0\0\0", "version 3 .* reads version 2", id="newer"),
        pytest.param(b"qvledger\1\0\0\0\2\0\0\0{}", "version 1 .* reads version 2", id="older"),
        pytest.param(b"qvledger\2\0\0\0\xff\xff\xff\xff", "header is damaged", id="vast-header"),
        pytest.param(b"qvledger\2\0\0\0\2\0\0\0{}", "header is damaged", id="no-crc"),
        pytest.param(
            (start := b"qvledger\2\0\0\0\2\0\0\0{}") + zlib.crc32(start).to_bytes(4, "little"),
            "header is damaged.*dataset",
            id="no-fields",
        ),
    ],
)
def test_what_is_no_ledger_is_refused(path: Path, content: bytes, why: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"replay=.*{why}"):
        LedgerReader(path, RUN)
    with pytest.raises(ValueError, match=f"ledger=.*{why}"):
        LedgerWriter(path, RUN, resume=True)
    assert path.read_bytes() == content


# ---- What counts.


def numbered(first: int, last: int, life: str) -> list[bytes]:
    return [f"{life}{number}".encode() for number in range(first, last + 1)]


def test_batches_after_the_checkpoint_that_a_run_resumed_from_do_not_count(path: Path) -> None:
    first, second, third = numbered(1, 70, "a"), numbered(51, 60, "b"), numbered(21, 90, "c")
    written(path, (0, None, 0, first), (0, None, 50, second))
    assert records_of(LedgerReader(path, RUN), 0) == first[:50] + second
    written(path, (0, None, 0, first), (0, None, 50, second), (0, None, 20, third))
    assert records_of(LedgerReader(path, RUN), 0) == first[:20] + third
    written(path, (0, None, 0, first), (0, None, 50, second), (0, None, 55, third))
    assert records_of(LedgerReader(path, RUN), 0) == first[:50] + second[:5] + third
    written(path, (0, None, 0, first), (0, None, 0, second))
    assert records_of(LedgerReader(path, RUN), 0) == second


def test_repeats_are_cut_where_the_checkpoint_was(path: Path) -> None:
    written(path, (0, None, 0, [b"p"] * 70), (0, None, 50, [b"q"]))
    assert records_of(LedgerReader(path, RUN), 0) == [b"p"] * 50 + [b"q"]


def test_a_segment_may_begin_with_what_the_last_one_ended_with(path: Path) -> None:
    written(path, (0, None, 0, [b"p"]), (1, None, 0, [b"p", b"p"]), (1, None, 1, [b"p"]))
    reader = LedgerReader(path, RUN)
    assert records_of(reader, 0) == [b"p"]
    assert records_of(reader, 1) == [b"p", b"p"]


def test_a_later_deal_follows_an_earlier_one(path: Path) -> None:
    early, late = np.arange(100) < 30, np.arange(100) < 60
    a, b, c = numbered(1, 5, "a"), numbered(1, 6, "b"), numbered(1, 7, "c")
    written(path, (0, None, 0, a), (0, early, 0, b), (0, late, 0, c), (0, late, 4, [b"last"]))
    assert_same(LedgerReader(path, RUN).batches(0), [(None, a), (early, b), (late, [*c[:4], b"last"])])


def test_resuming_in_an_earlier_deal_discards_those_since(path: Path) -> None:
    early, late = np.arange(100) < 30, np.arange(100) < 60
    a, b, c = numbered(1, 5, "a"), numbered(1, 6, "b"), numbered(1, 7, "c")
    written(path, (0, None, 0, a), (0, early, 0, b), (0, late, 0, c), (0, None, 3, [b"x"]), (0, late, 0, [b"y"]))
    assert_same(LedgerReader(path, RUN).batches(0), [(None, [*a[:3], b"x"]), (late, [b"y"])])


def test_masks_of_other_lengths_are_other_deals(path: Path) -> None:
    written(path, (0, np.zeros(8, bool), 0, [b"a"]), (0, np.zeros(9, bool), 0, [b"b"]), (0, None, 0, [b"c"]))
    assert [records for _, records in LedgerReader(path, RUN).batches(0)] == [[b"a"], [b"b"], [b"c"]]


def test_an_epoch_with_missing_batches_is_refused_and_the_others_are_not(path: Path) -> None:
    written(path, (0, None, 0, numbered(1, 45, "a")), (0, None, 50, [b"x"]), (1, None, 3, [b"y"]), (2, None, 0, [b"z"]))
    reader = LedgerReader(path, RUN)
    with pytest.raises(ValueError, match=r"replay=.*batches 46 to 50 of epoch 0 are missing"):
        reader.batches(0)
    with pytest.raises(ValueError, match=r"replay=.*batches 1 to 3 of epoch 1 are missing"):
        reader.batches(1)
    assert records_of(reader, 2) == [b"z"]


def test_a_gap_behind_the_resumed_checkpoint_does_not_matter(path: Path) -> None:
    first = numbered(1, 45, "a")
    written(path, (0, None, 0, first), (0, None, 50, [b"x"]), (0, None, 40, [b"y"]))
    assert records_of(LedgerReader(path, RUN), 0) == [*first[:40], b"y"]
