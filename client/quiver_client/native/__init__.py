"""The loops over a batch's samples in native code, ``pieces.c``; ``pieces`` is ``None`` where it cannot be used.

Copying and hashing 256 images in Python are 256 calls that each release the GIL and contend for it with the training
loop; 1,024 samples of 4 kB spend more on the calls than on the bytes. ``pieces.c`` takes one call per batch, without
the GIL. It is compiled at installation, if there is a C compiler (``hatch_build.py``); without it, or with
``QUIVER_NATIVE=0``, ``quiver_client.buffers`` does the same in Python.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

LIBRARY: Final = Path(__file__).with_name("_pieces.so")
VERSION: Final = 3  # of the functions in pieces.c
NATIVE_VARIABLE: Final = "QUIVER_NATIVE"
# The first detects vector instructions when it runs; not every build of the library exports it.
HASHES: Final = ("XXH3_64bits_dispatch", "XXH3_64bits")
PROVED_WITH: Final = (0, 1, 8, 16, 17, 128, 129, 240, 241, 1024, 5000)  # a size for each branch of XXH3

U8 = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


# A new bytes object may be written to while nothing else refers to it: this is how C extensions make bytes.
_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)


class Pieces:
    """Copies and hashes pieces of memory by address. Nothing is checked here: a wrong address ends the process.

    Mapped memory that cannot be read, since its file was truncated or its disk fails, is marked in ``torn (n,)``, and
    what is returned for it is undefined.
    """

    def __init__(self, library: ctypes.CDLL, hash_function: ctypes.c_void_p) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._hash_function = hash_function
        self._copy, self._hash = library.quiver_copy, library.quiver_hash
        self._copy.argtypes, self._copy.restype = (number, pointer, number, pointer, pointer), None
        self._hash.argtypes, self._hash.restype = (pointer, number, pointer, pointer, pointer, pointer), None
        self._join = library.quiver_join
        self._join.argtypes, self._join.restype = (number, *[pointer] * 6), None
        # With the GIL: releasing it and acquiring it again takes longer than copying one sample.
        kind = ctypes.PYFUNCTYPE(number, number, number, ctypes.c_char_p, number)
        self._take = kind(ctypes.cast(library.quiver_take, pointer).value or 0)

    def copy(self, addresses: I64, size: int, torn: Mask) -> U8:
        """Return ``(n, size)``: ``size`` bytes from each address."""
        addresses = np.ascontiguousarray(addresses, np.int64)
        rows = np.empty((len(addresses), size), np.uint8)
        self._copy(len(addresses), addresses.ctypes.data, size, rows.ctypes.data, torn.ctypes.data)
        return rows

    def xxh3_64(self, addresses: I64, sizes: I64, torn: Mask) -> U64:
        """Return the XXH3-64 ``(n,)`` of ``sizes (n,)`` bytes from each address."""
        addresses, sizes = np.ascontiguousarray(addresses, np.int64), np.ascontiguousarray(sizes, np.int64)
        found = np.empty(len(addresses), np.uint64)
        places = addresses.ctypes.data, sizes.ctypes.data, found.ctypes.data, torn.ctypes.data
        self._hash(self._hash_function, len(found), *places)
        return found

    def join(self, addresses: I64, sizes: I64, offsets: I64, ends: I64, torn: Mask) -> bytes:
        """Return ``sizes (n,)`` bytes from each address, each at its offset: the sums of the sizes before it.

        A piece is also torn if the 8 bytes before its ``ends (n,)`` are all 0 once all pieces were copied.
        """
        addresses, sizes = np.ascontiguousarray(addresses, np.int64), np.ascontiguousarray(sizes, np.int64)
        offsets, ends = np.ascontiguousarray(offsets, np.int64), np.ascontiguousarray(ends, np.int64)
        joined: bytes = _new_bytes(None, int(sizes.sum()))
        places = [array.ctypes.data for array in (addresses, sizes, offsets, ends)]
        self._join(len(addresses), *places, joined, torn.ctypes.data)
        return joined

    def take(self, address: int, size: int, end: int) -> bytes | None:
        """Return ``size`` bytes from an address, ``None`` if they are torn or the 8 bytes before ``end`` are all 0."""
        data: bytes = _new_bytes(None, size)
        return data if self._take(address, size, data, end) else None


def load(library: Path = LIBRARY) -> Pieces | None:
    """Return the built library if it is of this version, copies correctly and hashes as ``xxhash`` does."""
    try:
        built = ctypes.CDLL(str(library))
        built.quiver_pieces_version.restype = ctypes.c_int64
        if built.quiver_pieces_version() != VERSION:
            return None
        hashes = ctypes.CDLL(str(importlib.import_module("xxhash._xxhash").__file__))
        name = next(name for name in HASHES if hasattr(hashes, name))
        found = Pieces(built, ctypes.cast(getattr(hashes, name), ctypes.c_void_p))
    except (OSError, ImportError, AttributeError, StopIteration):
        return None
    return found if _is_right(found) else None


def _is_right(pieces: Pieces) -> bool:
    data = np.arange(max(PROVED_WITH), dtype=np.uint8)
    address, sizes = data.ctypes.data, np.asarray(PROVED_WITH, np.int64)
    expected = [xxhash.xxh3_64_intdigest(data[:size].data) for size in PROVED_WITH]
    torn = np.zeros(len(sizes), bool)
    rows = pieces.copy(np.asarray([address + 7, address, address + 3]), 100, torn)
    copied = all((row == data[at : at + 100]).all() for row, at in zip(rows, (7, 0, 3), strict=True))
    hashed = pieces.xxh3_64(np.full(len(sizes), address), sizes, torn).tolist() == expected
    places, lengths, offsets = np.asarray([address + 9, address, address + 2]), np.asarray([300, 0, 7]), [0, 300, 300]
    joined = pieces.join(places, lengths, np.asarray(offsets), np.full(3, address + 20), torn)
    taken = pieces.take(address + 5, 200, address + 20)
    right = copied and hashed and joined == bytes(data[9:309]) + bytes(data[2:9]) and taken == bytes(data[5:205])
    return right and not torn.any()


pieces: Pieces | None = load() if os.environ.get(NATIVE_VARIABLE) != "0" else None
