"""The states of loaders in checkpoints: found wherever a trainer put them, and never by running a checkpoint's code.

A file is JSON, or what ``torch.save`` wrote; that is loaded with ``weights_only=True``, which makes plain values and
tensors and nothing else, and its tensors are left on disk. A folder is a checkpoint of Hugging Face's Trainer or of
Accelerate, or any other folder of such files. A state is found by its marker: the keys that every state has.

JSON has no bytes: what is bytes in a state is Base64 there, as ``msgspec.json.encode`` writes it, or a list of numbers.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import json
import os
import pickle
import re
import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from quiver.errors import BadRequest, DiskFailed, NotFound

SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt", ".json", ".tar")
FILES_MAX: Final = 512  # of a folder
DEPTH_MAX: Final = 32
VALUES_MAX: Final = 1 << 20  # that are looked at in one file
JSON_BYTES_MAX: Final = 1 << 30
PACKED: Final = "quiver"  # the only key of a state that was packed into one value
_MARKER: Final = frozenset({"version", "dataset", "samples", "seed", "epoch", "rank", "world_size", "batch_size"})
# What torch raises, beside others, for bytes that are no pickle: a ".bin" of another program, or a damaged file.
_UNLOADABLE: Final = (pickle.UnpicklingError, EOFError, LookupError, AssertionError, struct.error)
_BYTES: Final = ("done", "own", "positions", "rest")
_NUMBERS: Final = ("samples", "seed", "epoch", "rank", "world_size", "batch_size")
_NUMBER: Final = re.compile(r"(\d+)")


class Found(NamedTuple):
    """A state, and where it was: the file, and the keys that lead to it, joined by dots."""

    file: Path
    key: str
    state: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.file}: {self.key}" if self.key else str(self.file)


def states_in(path: Path) -> list[Found]:
    """Return all states in a file, or in the files of a folder.

    Raises ``NotFound`` if there is no such file, or no state in it, ``BadRequest`` for a file that cannot be read
    without running code, ``DiskFailed``.
    """
    if path.is_dir():
        return _in_folder(path)
    found = list(_in_file(path))
    if not found:
        raise NotFound(f"{path}: no loader's state is in it; save what loader.state_dict(merged=True) returns")
    return found


def _in_folder(folder: Path) -> list[Found]:
    if (folder / ".metadata").is_file():
        raise BadRequest(
            f"{folder}: a folder of torch.distributed.checkpoint can only be read by unpickling it; save what"
            " loader.state_dict(merged=True) returns in a file of its own with torch.save, and give that"
        )
    found: list[Found] = []
    refused: list[BadRequest] = []
    for file in _files(folder):
        try:
            found += _in_file(file)
        except BadRequest as error:  # of an optimizer or of random states: a state is plain values
            refused.append(error)
    if not found:
        why = f" ({refused[0]})" if refused else ""
        raise NotFound(f"{folder}: no loader's state is in any file of this folder{why}")
    return found


def _files(folder: Path) -> list[Path]:
    """Return the files that may have states, in order: rank 10 after rank 9."""
    files: list[Path] = []
    try:
        for parent, folders, names in os.walk(folder):
            folders.sort()
            files += [Path(parent, name) for name in names if name.endswith(SUFFIXES)]
            if len(files) > FILES_MAX:
                raise BadRequest(f"{folder}: it has more than {FILES_MAX} files; name the one with the loader's state")
    except OSError as error:
        raise DiskFailed(f"cannot read {folder}: {error.strerror or error}") from error
    return sorted(files, key=lambda file: [int(it) if it.isdecimal() else it for it in _NUMBER.split(str(file))])


def _in_file(file: Path) -> Iterator[Found]:
    loaded = _loaded(file)
    try:
        for key, state in _search(loaded):
            yield Found(file, key, state)
    except (BadRequest, ValueError) as error:  # a damaged state
        raise BadRequest(f"{file}: {error}") from error


def _loaded(file: Path) -> Any:
    """Return the plain values of a file."""
    try:
        with file.open("rb") as reader:
            head = reader.read(64).removeprefix(codecs.BOM_UTF8).lstrip()
        if head[:1] in (b"{", b"["):
            if file.stat().st_size > JSON_BYTES_MAX:
                raise BadRequest(f"{file}: JSON of more than {JSON_BYTES_MAX >> 30} GiB is no loader's state")
            return json.loads(file.read_bytes())
        return _of_torch(file, is_archive=head[:4] == b"PK\3\4")
    except FileNotFoundError:
        raise NotFound(f"there is no checkpoint at {file}") from None
    except (ValueError, RecursionError) as error:  # of JSON: cut off, no UTF-8, a number of 5,000 digits
        raise BadRequest(f"{file}: it is no JSON: {str(error)[:160]}") from error
    except OSError as error:
        raise DiskFailed(f"cannot read {file}: {error.strerror or error}") from error


def _of_torch(file: Path, *, is_archive: bool) -> Any:
    """``is_archive``: it has the format of today, of which tensors are mapped instead of read."""
    import torch  # only here: JSON needs none of it

    try:
        with warnings.catch_warnings(action="ignore"):  # of formats that are deprecated, and read all the same
            return torch.load(file, map_location="meta", weights_only=True, mmap=is_archive)
    except (*_UNLOADABLE, RuntimeError, ValueError, AttributeError, TypeError) as error:
        first = re.split(r"(?<=\.)\s|\n", str(error), maxsplit=1)[0] or type(error).__name__  # torch says more
        raise BadRequest(
            f"{file}: torch.load(weights_only=True) does not load it, and anything else could run its code"
            f" ({first[:160]}); save what loader.state_dict(merged=True) returns in a file of its own"
        ) from error


def _search(loaded: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the states in nested dictionaries and lists, each with the keys that lead to it."""
    looked_at = 0
    stack: list[tuple[str, Any, int]] = [("", loaded, 0)]
    while stack:
        key, value, depth = stack.pop()
        looked_at += 1
        if looked_at > VALUES_MAX or depth > DEPTH_MAX:
            continue
        if isinstance(value, Mapping):
            state = _as_state(value)
            if state is not None:
                yield key, state
                continue
            inside: Sequence[tuple[Any, Any]] = list(value.items())
        elif isinstance(value, list | tuple):
            inside = list(enumerate(value))
        else:
            continue
        for name, each in reversed(inside):
            if isinstance(each, Mapping | list | tuple):
                stack.append((f"{key}.{name}" if key else str(name), each, depth + 1))


def _as_state(value: Mapping[Any, Any]) -> Mapping[str, Any] | None:
    """Return a state, with its bytes as bytes; ``None`` for anything else."""
    if set(value) == {PACKED} and isinstance(value[PACKED], bytes | str):
        from quiver_client.loader.merged_state import unpacked

        try:
            inside = unpacked({PACKED: _as_bytes(PACKED, value[PACKED])})
        except (BadRequest, ValueError):  # something else of this name, such as a version
            return None
        return _as_state(inside) if isinstance(inside, Mapping) and PACKED not in inside else None
    if not value.keys() >= _MARKER or not isinstance(value["dataset"], str):
        return None
    for name in _NUMBERS:
        if not isinstance(value[name], int):
            raise BadRequest(f"state: {name!r} is no whole number but {repr(value[name])[:40]}; the state is damaged")
    plain = {name: _as_bytes(name, each) if name in _BYTES else each for name, each in value.items()}
    parts = value.get("parts")
    if isinstance(parts, Mapping):
        plain["parts"] = {name: _as_part(name, part) for name, part in parts.items()}
    return plain


def _as_part(name: Any, part: Any) -> Mapping[str, Any]:
    passes = part.get("passes") if isinstance(part, Mapping) else None
    if not isinstance(passes, list | tuple) or not all(isinstance(each, Mapping) for each in passes):
        raise BadRequest(f"state: part {str(name)[:40]!r} of a mixture has no list of passes; the state is damaged")
    return {**part, "passes": [_as_state(each) or each for each in passes]}


def _as_bytes(name: str, value: Any) -> Any:
    try:
        if isinstance(value, str):
            return base64.b64decode(value, validate=True)
        return bytes(value) if isinstance(value, list | bytearray) else value
    except (binascii.Error, ValueError, TypeError) as error:
        raise BadRequest(f"state: {name!r} is neither Base64 nor a list of bytes: {error}") from error
