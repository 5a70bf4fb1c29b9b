"""Second preimages of XXH3-64: other bytes of the same length and checksum, as an attacker makes them.

Of long inputs (more than 240 bytes) XXH3 adds up each block of 1,024 bytes in eight lanes of 64 bits: a word of a
stripe, ``d``, is added to the neighbouring lane, and the product of the two halves of ``d ^ secret`` to its own. Where
one half of that is zero, the product is zero and the other half of the word is free. So two stripes of 64 bytes set
all eight sums to whatever they were before, and the rest of the block may be anything.

Of 16 bytes, ``lo`` and ``hi``, the hash mixes ``swapped(lo) + hi + folded(lo * hi)``: with ``lo`` zero it is ``hi``.
"""

from __future__ import annotations

import struct
from typing import Final

import xxhash

SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
BLOCK_BYTES: Final = 1024
STRIPE_BYTES: Final = 64
STRIPES: Final = BLOCK_BYTES // STRIPE_BYTES
LANES: Final = 8
FREE_BYTES: Final = (STRIPES - 2) * STRIPE_BYTES  # of a block, that the attacker chooses
MASK: Final = 2**64 - 1
LOW: Final = 2**32 - 1
SHORT_BYTES: Final = 16


def forged(original: bytes, text: bytes) -> bytes:
    """Return other bytes with the length and XXH3-64 of ``original``, which begin with as much of ``text`` as fits.

    For 16 bytes, where nothing can be chosen, and for 1,088 or more.
    """
    made = _short(original) if len(original) == SHORT_BYTES else _long(original, text)
    assert made != original
    assert len(made) == len(original)
    assert xxhash.xxh3_64_intdigest(made) == xxhash.xxh3_64_intdigest(original)
    return made


def _words(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 8}Q", data)


def _keys(stripe: int) -> tuple[int, ...]:
    return _words(SECRET[8 * stripe : 8 * stripe + STRIPE_BYTES])


def _sums(block: bytes) -> list[int]:
    """Return what a block, or a part of one, adds to the eight lanes."""
    sums = [0] * LANES
    for stripe in range(len(block) // STRIPE_BYTES):
        words = _words(block[stripe * STRIPE_BYTES : (stripe + 1) * STRIPE_BYTES])
        for lane, (word, key) in enumerate(zip(words, _keys(stripe), strict=True)):
            mixed = word ^ key
            sums[lane ^ 1] = (sums[lane ^ 1] + word) & MASK
            sums[lane] = (sums[lane] + (mixed & LOW) * (mixed >> 32)) & MASK
    return sums


def _long(original: bytes, text: bytes) -> bytes:
    assert len(original) >= BLOCK_BYTES + STRIPE_BYTES, "the last stripe is hashed with another secret"
    free = text[:FREE_BYTES].ljust(FREE_BYTES, b".")
    wanted, given = _sums(original[:BLOCK_BYTES]), _sums(free)
    first, second = [0] * LANES, [0] * LANES
    for lane in range(LANES):
        left = (wanted[lane ^ 1] - given[lane ^ 1]) & MASK  # to be the sum of this lane's two words
        key_of_first, key_of_second = _keys(STRIPES - 2)[lane], _keys(STRIPES - 1)[lane]
        # The first word's low half is that of its key, and the second word's high half: both products are zero.
        low = (left - (key_of_first & LOW)) & LOW
        second[lane] = (key_of_second >> 32) << 32 | low
        first[lane] = (left - second[lane]) & MASK
        assert first[lane] & LOW == key_of_first & LOW
    return free + struct.pack("<8Q", *first) + struct.pack("<8Q", *second) + original[BLOCK_BYTES:]


def _short(original: bytes) -> bytes:
    """The sum that is mixed in the end is, with ``lo = 0``: the length and ``hi``."""
    flips = [_words(SECRET[at : at + 8])[0] ^ _words(SECRET[at + 8 : at + 16])[0] for at in (24, 40)]
    lo, hi = (word ^ flip for word, flip in zip(_words(original), flips, strict=True))
    product = lo * hi
    swapped = int.from_bytes(lo.to_bytes(8, "little"), "big")
    mixed = (swapped + hi + ((product & MASK) ^ (product >> 64))) & MASK
    return struct.pack("<2Q", flips[0], mixed ^ flips[1])
