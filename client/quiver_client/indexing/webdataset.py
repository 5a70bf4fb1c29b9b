"""Indexes WebDataset tars: the members ``dir/base.*`` with one ``dir/base`` are a sample, each extension a field.

One streaming pass over each tar, several tars concurrently. A window of the tar is in memory. A sample is hashed from
the window when the next one begins, so that its fields are in the header's order, whatever their order in the tar.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import blake3
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from quiver.errors import BadRequest
from quiver.manifest import ABSENT, BLOB_TYPE, OriginObject
from quiver.manifest.schema import FIELDS_MAX, Field
from quiver_client.indexing.columns import XXH3_OF_NOTHING, Growing, Rows, Samples, byte_rows
from quiver_client.indexing.npy import NpyField, named_npy
from quiver_client.indexing.objects import Listing
from quiver_client.indexing.parallel import Meter, in_order
from quiver_client.indexing.reading import PIECE_BYTES, Handle, Objects
from quiver_client.indexing.report import NAMES_MAX, Notices
from quiver_client.indexing.selection import Selection
from quiver_client.indexing.tar import TarMember, members

CLASS_FIELD: Final = "cls"
CLASS_BYTES_MAX: Final = 64
FLUSH_ROWS: Final = 1024
TARS_REMOTE: Final = 8  # each holds a window of PIECE_BYTES


class Part(NamedTuple):
    """A member of a sample."""

    offset: int
    size: int


def index_tars(
    listing: Listing, objects: Objects, meter: Meter, notices: Notices, selection: Selection
) -> tuple[Samples, tuple[Field, ...]]:
    """Hash every sample of every tar."""
    samples = Samples()
    threads = min(objects.threads, TARS_REMOTE) if not listing.local else objects.threads

    npy: dict[str, NpyField] = {}

    left_out: set[str] = set()

    def work(number: int) -> tuple[Samples, dict[str, NpyField], Notices]:
        tar = _Tar(listing, number, objects, selection)
        found = tar.index()
        left_out.update(tar.left_out)
        return found

    for found, seen, said in in_order(work, range(len(listing)), threads, meter.stop):
        notices.merge(said)
        samples.absorb(found)
        for name, one in seen.items():
            npy.setdefault(name, NpyField()).merge(one)
        if len(samples.blobs) > FIELDS_MAX:
            names = ", ".join(sorted(samples.blobs)[:5])
            raise BadRequest(
                f"the tars have more than {FIELDS_MAX} different extensions ({names}, …), each a field of its own;"
                " is there a dot in the names of the samples? --format files indexes each tar as it is"
            )
    selection.check(samples.blobs.keys() | samples.scalars.keys() | left_out, listing.base)
    if len(samples) and not samples.blobs:
        raise BadRequest(f"{listing.base}: no member of the tars holds bytes beside .cls; there is nothing to cache")
    fields = [npy.get(name, NpyField()).described(Field(name, BLOB_TYPE)) for name in samples.blobs]
    if CLASS_FIELD in samples.scalars:
        fields.append(Field(CLASS_FIELD, "int64"))
    fields.sort(key=lambda field: field.name)
    _name_incomplete(samples, notices)
    return samples, tuple(fields)


def split_name(name: str) -> tuple[str, str] | None:
    """Return key and extension: the extension starts at the first dot of the last part. None if it has none."""
    name = name.removeprefix("./")
    folder, slash, last = name.rpartition("/")
    stem, dot, extension = last.partition(".")
    if not stem or not dot or not extension or (stem.startswith("__") and stem.endswith("__")):
        return None
    return folder + slash + stem, extension.lower()


class Window:
    """A window on an object, read in long runs: forward, or from the offset ``keep`` on."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._buffer = bytearray(min(PIECE_BYTES, handle.size))
        self._start = self._end = 0
        self.keep = 0  # bytes from here on will be needed again

    def read(self, offset: int, length: int) -> memoryview:
        """Return bytes of the object, at most ``PIECE_BYTES``, valid until the next call."""
        if self._start <= offset <= offset + length <= self._end:
            at = offset - self._start
            return memoryview(self._buffer)[at : at + length]
        if offset > self._end and offset + length - self.keep > len(self._buffer):
            peek = memoryview(bytearray(length))  # the header behind a large member: keep what precedes it
            self._handle.read_into(offset, peek)
            return peek
        self._move(offset, length)
        at = offset - self._start
        return memoryview(self._buffer)[at : at + length]

    def _move(self, offset: int, length: int) -> None:
        start = min(self.keep, offset)
        if offset + length - start > len(self._buffer):
            start = offset  # the kept bytes do not fit beside it, and are read again if needed
        have = max(self._end - start, 0) if self._start <= start else 0
        if have:
            self._buffer[:have] = self._buffer[start - self._start : self._end - self._start]
        end = min(start + len(self._buffer), self._handle.size)
        self._start, self._end = start, start + have
        self._handle.read_into(start + have, memoryview(self._buffer)[have : end - start])
        self._end = end


class _Tar:
    """One tar being indexed."""

    def __init__(self, listing: Listing, number: int, objects: Objects, selection: Selection) -> None:
        self._selection = selection
        self.left_out: set[str] = set()  # extensions that were not selected
        self._number = number
        self._listed: OriginObject = listing.object(number)
        self._objects = objects
        self._prefix = "" if listing.single else self._listed.path + "/"
        self._samples = Samples()
        self._notices = Notices()
        self._key_hashes = Growing(np.uint64)  # of all keys: detecting duplicates takes 8 bytes per sample
        self._keys: list[str] = []
        self._digests: list[bytes] = []
        self._rows: list[dict[str, tuple[int, int, int]]] = []  # extension -> length, offset, xxh3
        self._classes: list[int | None] = []
        self._npy: dict[str, NpyField] = {}

    def index(self) -> tuple[Samples, dict[str, NpyField], Notices]:
        self._handle = self._objects.open(self._listed)
        self._window = Window(self._handle)
        done = False
        try:
            self._walk()
            self._flush()
            if not len(self._samples):
                self._notices.add("tars without a sample", self._listed.path)
            self._join_interleaved()
            done = True
        finally:
            self._handle.close(check=done)
        return self._samples, self._npy, self._notices

    def _walk(self) -> None:
        key = ""
        parts: dict[str, Part] = {}
        for member in members(self._handle.url, self._handle.size, self._window.read, self._no_end, self._more):
            named = self._named(member)
            if named is None:
                continue
            if named[0] != key:
                self._finish(key, parts)
                key, parts = named[0], {}
                self._window.keep = member.start
            if named[1] in parts:
                raise self._twice(key, named[1])
            parts[named[1]] = Part(member.offset, member.size)
        self._finish(key, parts)

    def _named(self, member: TarMember) -> tuple[str, str] | None:
        shown = f"{self._listed.path}: {member.name}"
        if member.odd:
            self._notices.add(f"members left out, {member.odd}", shown)
            return None
        named = split_name(member.name)
        if named is None:
            self._notices.add("members left out, names without an extension", shown)
        elif not self._selection.takes(named[1]):
            self.left_out.add(named[1])
            return None
        return named

    def _finish(self, key: str, parts: dict[str, Part]) -> None:
        """Hash a sample whose members have all been seen."""
        if not parts:
            return
        label = parts.pop(CLASS_FIELD, None)
        self._classes.append(None if label is None else self._class(key, label))
        strong = blake3.blake3()
        row = {}
        for name in sorted(parts):
            weak = xxhash.xxh3_64()
            pieces = self._pieces(parts[name])
            if named_npy(name):
                pieces = self._npy.setdefault(name, NpyField()).watch(pieces, parts[name].size)
            for piece in pieces:
                strong.update(piece)
                weak.update(piece)
            row[name] = parts[name].size, parts[name].offset, weak.intdigest()
        self._keys.append(self._prefix + key)
        self._digests.append(strong.digest())
        self._rows.append(row)
        if len(self._keys) == FLUSH_ROWS:
            self._flush()

    def _class(self, key: str, part: Part) -> int:
        text = bytes(self._window.read(part.offset, min(part.size, CLASS_BYTES_MAX)))
        try:
            value = int(text)
        except ValueError:
            value = 1 << 63
        if part.size > CLASS_BYTES_MAX or not -(1 << 63) <= value < 1 << 63:
            raise BadRequest(
                f"{self._handle.url}: {key}.cls holds {text[:20]!r}, which is no integer of 64 bits;"
                " a class that is no number belongs into .txt or .json"
            )
        return value

    def _flush(self) -> None:
        count = len(self._keys)
        if not count:
            return
        blobs = {}
        for name in {name for row in self._rows for name in row}:
            rows = [row.get(name, (ABSENT, 0, XXH3_OF_NOTHING)) for row in self._rows]
            columns = np.asarray(rows, np.uint64).T
            blobs[name] = columns[0], columns[1], columns[2]
        scalars: dict[str, pa.Array] = {}
        if any(value is not None for value in self._classes):
            scalars[CLASS_FIELD] = pa.array(self._classes, pa.int64())
        keys = pa.array(self._keys, pa.large_utf8())
        self._key_hashes.extend([xxhash.xxh3_64_intdigest(key.encode()) for key in self._keys])
        objects = np.full(count, self._number, np.uint32)
        self._samples.extend(Rows(keys, byte_rows(self._digests), objects, blobs, scalars))
        self._keys, self._digests, self._rows, self._classes = [], [], [], []

    def _no_end(self) -> None:
        self._notices.add("tars without an end mark, perhaps cut short between two members", self._listed.path)

    def _more(self) -> None:
        what = "tars with data after their end mark, which is left out; were tars concatenated?"
        self._notices.add(what, self._listed.path)

    def _twice(self, key: str, extension: str) -> BadRequest:
        return BadRequest(
            f"{self._handle.url} holds the member {key}.{extension} twice; which one is meant is unknown: remove one"
        )

    def _join_interleaved(self) -> None:
        """Merge the rows of samples whose members are not adjacent, and report them."""
        samples = self._samples
        if not len(samples):
            return
        hashes = np.sort(self._key_hashes.take())
        if not (hashes[1:] == hashes[:-1]).any():
            return
        keys = samples.keys.view()
        counts = pc.value_counts(keys)
        names = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
        if not len(names):
            return
        torn = np.flatnonzero(pc.is_in(keys, value_set=names).to_numpy(zero_copy_only=False))
        self._notices.add(
            "samples whose members are interleaved with those of others",
            *names[:NAMES_MAX].to_pylist(),
            count=len(names),
        )
        runs: dict[str, list[int]] = {}
        for row in torn.tolist():
            runs.setdefault(keys[row].as_py(), []).append(row)
        del keys, counts, names
        self._join_labels(runs)
        for key, rows in runs.items():
            self._join(key, rows)
        gone = np.zeros(len(samples), np.bool_)
        gone[[row for rows in runs.values() for row in rows[1:]]] = True
        samples.keep(np.flatnonzero(~gone))

    def _join_labels(self, runs: dict[str, list[int]]) -> None:
        """Copy the class that one of a sample's rows has to its first row."""
        if CLASS_FIELD not in self._samples.scalars:
            return
        labels = self._samples.take_scalar(CLASS_FIELD)
        known = pc.is_valid(labels).to_numpy(zero_copy_only=False).copy()
        values = labels.fill_null(0).to_numpy().copy()
        for key, rows in runs.items():
            having = [row for row in rows if known[row]]
            if len(having) > 1:
                raise self._twice(key.removeprefix(self._prefix), CLASS_FIELD)
            if having:
                known[rows[0]], values[rows[0]] = True, values[having[0]]
        self._samples.scalars[CLASS_FIELD] = [pa.array(values, pa.int64(), mask=~known)]

    def _join(self, key: str, rows: list[int]) -> None:
        """Move the byte fields of several rows to the first of them."""
        first = rows[0]
        parts: dict[str, Part] = {}
        holders = set()
        for name, column in self._samples.blobs.items():
            lengths, origins, xxh3 = column.lengths.view(), column.origins.view(), column.xxh3.view()
            having = [row for row in rows if lengths[row] != ABSENT]
            if len(having) > 1:
                raise self._twice(key.removeprefix(self._prefix), name)
            for row in having:
                holders.add(row)
                parts[name] = Part(int(origins[row]), int(lengths[row]))
                lengths[first], origins[first], xxh3[first] = lengths[row], origins[row], xxh3[row]
        digests = self._samples.digests.view()
        if len(holders) == 1:  # the other runs held only a class, which is not hashed
            digests[first] = digests[holders.pop()]
            return
        strong = blake3.blake3()
        for name in sorted(parts):
            for piece in self._pieces(parts[name]):
                strong.update(piece)
        digests[first] = np.frombuffer(strong.digest(), np.uint8)

    def _pieces(self, part: Part) -> Iterator[memoryview]:
        end = part.offset + part.size
        for at in range(part.offset, end, PIECE_BYTES):
            yield self._window.read(at, min(PIECE_BYTES, end - at))


def _name_incomplete(samples: Samples, notices: Notices) -> None:
    """Report which samples lack a member that others have."""
    for name in sorted(samples.blobs):
        rows = np.flatnonzero(samples.blobs[name].lengths.view() == np.uint64(ABSENT))
        if len(rows):
            _name(samples, rows, f"samples without a member .{name}", notices)
    for name, chunks in samples.scalars.items():
        if sum(chunk.null_count for chunk in chunks):
            missing = np.concatenate([np.asarray(pc.is_null(chunk)) for chunk in chunks])
            _name(samples, np.flatnonzero(missing), f"samples without a member .{name}", notices)


def _name(samples: Samples, rows: Any, what: str, notices: Notices) -> None:
    names = samples.keys.view().take(pa.array(rows[:NAMES_MAX])).to_pylist()
    notices.add(what, *names, count=len(rows))
