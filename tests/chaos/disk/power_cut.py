"""What a power cut may leave of a folder: exactly what was synced, and any part of the rest.

The calls of a life are recorded by ``faultfs``. For a cut behind any of them, a folder is made anew of

- the content of each file as of its last ``fsync``, and of each later write all, none, or whole sectors of it;
- each entry of a folder as of that folder's last ``fsync``, or as any later call left it, whatever became of others.

That is all that POSIX promises, and less than real file systems do: a rename may leave both names, or neither.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from tests.chaos.disk.faultfs import Op, Recorded

SECTOR_BYTES: Final = 512
FOLDER: Final = -1  # in place of a file's number, in an entry


class _Change(NamedTuple):
    """A change of a file's content: bytes at an offset, or a new size."""

    offset: int
    data: bytes
    size: int | None


class _Entry(NamedTuple):
    """What a name stood for after a change: the number of a file, ``FOLDER``, or ``None`` for nothing."""

    target: int | None


class Disk:
    """The state of a folder, with what is synced and what is not, as calls are applied one after the other."""

    def __init__(self, root: str, base: Path) -> None:
        self._root = root
        self._number_of: dict[int, int] = {}  # inode → number of the file; inodes are used again
        self._content: list[bytearray] = []  # as synced
        self._changes: list[list[_Change]] = []  # since
        self._entries: dict[str, list[_Entry]] = {}  # by path: the first is synced, the others are not
        self._opened: dict[str, int] = {}
        for path in sorted(base.rglob("*")):
            name = f"{root}/{path.relative_to(base)}"
            if path.is_dir():
                self._entries[name] = [_Entry(FOLDER)]
            else:
                self._entries[name] = [_Entry(self._add(path.read_bytes()))]
                self._opened[name] = self._entries[name][0].target or 0

    def _add(self, content: bytes = b"") -> int:
        self._content.append(bytearray(content))
        self._changes.append([])
        return len(self._content) - 1

    def apply(self, call: Recorded) -> None:
        match call.op:
            case Op.CREATE:
                self._number_of[call.inode] = number = self._add()
                self._name(call.path, number)
            case Op.MKDIR:
                self._name(call.path, FOLDER)
            case Op.RENAME:
                target = self._entries[call.path][-1].target
                self._name(call.path, None)
                self._name(call.other, target)
            case Op.UNLINK | Op.RMDIR:
                self._name(call.path, None)
            case Op.WRITE:
                self._changes[self._file(call)].append(_Change(call.offset, call.data, None))
            case Op.TRUNCATE:
                self._changes[self._file(call)].append(_Change(0, b"", call.offset))
            case Op.ALLOCATE:
                number = self._file(call)
                size = max(len(self._latest(number)), call.offset + call.extra)
                self._changes[number].append(_Change(0, b"", size))
            case Op.FSYNC:
                self._sync(call)
            case _:
                raise AssertionError(f"{call.op!r} is not modelled")

    def _file(self, call: Recorded) -> int:
        """Return the number of the file that a call on a descriptor changes: one that was there before has no inode."""
        if call.inode not in self._number_of:
            self._number_of[call.inode] = self._opened[call.path.removesuffix(" (deleted)")]
        return self._number_of[call.inode]

    def _name(self, path: str, target: int | None) -> None:
        self._entries.setdefault(path, [_Entry(None)]).append(_Entry(target))
        if target is not None and target != FOLDER:
            self._opened[path] = target

    def _sync(self, call: Recorded) -> None:
        path = call.path.removesuffix(" (deleted)")
        if path == self._root or self._entries.get(path, [_Entry(None)])[-1].target == FOLDER:
            for name, states in self._entries.items():
                if name.rpartition("/")[0] == path:
                    del states[:-1]
            return
        number = self._file(call)
        self._content[number] = self._latest(number)
        self._changes[number].clear()

    def _latest(self, number: int) -> bytearray:
        return _applied(self._content[number], self._changes[number])

    def leave(self, target: Path, chance: random.Random | None, keep: float) -> None:
        """Make the folder that a cut now may leave. ``keep``: how likely each change that is not synced survives.

        ``chance``: ``None`` for all of them.
        """
        target.mkdir()
        for name in sorted(self._entries):
            states = self._entries[name]
            if chance is None or chance.random() < keep:
                entry = states[-1] if chance is None else chance.choice(states[1:] or states)
            else:
                entry = states[0]
            path = target / name.removeprefix(f"{self._root}/")
            if entry.target is None or not path.parent.is_dir():  # or its folder was lost
                continue
            if entry.target == FOLDER:
                path.mkdir(exist_ok=True)
            else:
                path.write_bytes(self._survivor(entry.target, chance, keep))

    def _survivor(self, number: int, chance: random.Random | None, keep: float) -> bytes:
        if chance is None:
            return bytes(self._latest(number))
        changes = [part for change in self._changes[number] for part in _parts(change, chance, keep)]
        return bytes(_applied(self._content[number], changes))


def _applied(content: bytearray, changes: Iterable[_Change]) -> bytearray:
    found = bytearray(content)
    for offset, data, size in changes:
        if size is not None:
            del found[size:]
        end = size if size is not None else offset + len(data)
        found.extend(bytes(max(end - len(found), 0)))
        if size is None:
            found[offset:end] = data
    return found


def _parts(change: _Change, chance: random.Random, keep: float) -> list[_Change]:
    """Return what survives of a change: a size survives or does not, of a write any of the sectors that it touches."""
    if change.size is not None:
        return [change] if chance.random() < keep else []
    found, at, end = [], change.offset, change.offset + len(change.data)
    while at < end:
        after = min((at // SECTOR_BYTES + 1) * SECTOR_BYTES, end)
        if chance.random() < keep:
            found.append(_Change(at, change.data[at - change.offset : after - change.offset], None))
        elif chance.random() < keep:  # the file grew, and its sector was not written
            found.append(_Change(at, bytes(after - at), None))
        at = after
    return found
