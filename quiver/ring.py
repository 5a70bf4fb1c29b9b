"""Who holds which shard: weighted rendezvous hashing over the members of a rack.

Every member draws, for every shard, an exponential variate from a hash of both; the smallest wins (Thaler and
Ravishankar, 1998; the weighted form is Schindelhauer and Schomaker's logarithmic method, 2005). So a join or a leave
moves 1/N of the shards and nothing else, a member holds in proportion to its capacity, and after a join the previous
owner is the runner-up.

The hash is XXH3-64 of the first eight bytes of the shard's digest, seeded with the XXH3-64 of the member's name. For
eight bytes that is a dozen integer operations, done here for a whole array of shards at once and tested against the
library; ``tests/golden/ring.json`` pins the outcome. A ring is a hint: wrong content costs speed at most.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from quiver.cached import cached_property
from quiver.digest import Digest
from quiver.errors import BadRequest
from quiver.prepared import prepare

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
I32 = npt.NDArray[np.int32]

MEMBERS_MAX: Final = 4096
# Copies of a shard. Every reader ranks this many members for every shard of its dataset: 4 bytes each.
REPLICAS_MAX: Final = 8
DRAWS_AT_ONCE: Final = 1 << 14
DRAWS_MAX: Final = 1 << 22  # at a time: 32 MiB of temporaries, however many shards and members there are
URL_BYTES_MAX: Final = 256
SCHEMES: Final = ("http", "https")
SOCKET_BYTES_MAX: Final = 107  # Linux's limit of 108 less the terminating zero
_PRINTABLE = re.compile(r"[!-~]+")
_SOCKET = re.compile(rf"/[ -~]{{1,{SOCKET_BYTES_MAX - 1}}}")
NODE_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


class Member(msgspec.Struct, frozen=True):
    """A cache daemon as the ring knows it. ``weight`` is its capacity in bytes; a draining member owns nothing.

    ``socket`` is the path of the Unix socket on which it passes open files to readers on its own host, or empty.
    """

    id: str
    url: str
    weight: float = 1.0
    state: Literal["up", "draining"] = "up"
    socket: str = ""

    @property
    def certified_id(self) -> str:
        """The node id that its certificate must have; empty if it is named by its URL, as in a ring without etcd."""
        return "" if self.id == static_id(self.url) else self.id


def check_member(member: Member) -> Member:
    """Return the member if it is valid; raise ``BadRequest`` if not. Ring content is untrusted.

    An invalid socket path does not invalidate the member: clients reach its daemon over TCP.
    """
    if not NODE_ID.fullmatch(member.id):
        raise BadRequest(f"not a node id: {member.id[:80]!r}; use up to 64 letters, digits, dots, dashes, underscores")
    if not math.isfinite(member.weight) or not 0 < member.weight < 2**60:
        raise BadRequest(f"node {member.id}: weight {member.weight} is not a capacity")
    check_url(member.url)
    socket = usable_socket(member.socket)
    return member if socket == member.socket else msgspec.structs.replace(member, socket=socket)


def usable_socket(path: object) -> str:
    """Return the path if it is valid for a Unix socket (absolute, printable ASCII, not too long), else ``""``."""
    return path if isinstance(path, str) and _SOCKET.fullmatch(path) else ""


def check_url(url: str) -> str:
    """Return the URL of a daemon without a trailing slash; raise ``BadRequest`` if it is not ``http[s]://host:port``."""
    wrong = BadRequest(f"not the URL of a daemon: {url[:120]!r}; expected http://HOST:PORT or https://…")
    if len(url) > URL_BYTES_MAX or not _PRINTABLE.fullmatch(url):  # urlsplit silently drops line feeds
        raise wrong
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise wrong from error
    extra = parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc
    if parts.scheme not in SCHEMES or not parts.hostname or not port or extra:
        raise wrong
    return url.rstrip("/")


def static_id(url: str) -> str:
    """Return the node id derived from a daemon's URL: the same on every daemon, and distinct for distinct URLs."""
    parts = urlsplit(check_url(url))
    host, port = (parts.hostname or "").lower(), parts.port or 80
    name = f"{host}-{port}"
    if re.fullmatch(r"[a-z0-9][a-z0-9.-]*", host) and len(name) <= 64:
        return name
    told = re.sub(r"[^a-z0-9.]+", "-", host).strip("-.")[:32]
    return f"host-{told}-{port}-{xxhash.xxh3_64_hexdigest(host.encode())}"[:64]


@dataclass(frozen=True)
class Ring:
    """The members of a rack at one moment, sorted by id. Replaced when something changes, never mutated."""

    rack: str
    members: tuple[Member, ...]
    replicas: int = 1
    _seeds: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.members) > MEMBERS_MAX:
            raise BadRequest(f"a ring of {len(self.members)} members is larger than {MEMBERS_MAX}")
        if self.replicas > REPLICAS_MAX:
            raise BadRequest(f"a ring of {self.replicas} replicas has more than {REPLICAS_MAX}")
        ordered = tuple(sorted(self.members, key=lambda member: member.id))
        if len({member.id for member in ordered}) != len(ordered):
            raise BadRequest("two members of the ring have the same id")
        object.__setattr__(self, "members", ordered)
        object.__setattr__(self, "_seeds", tuple(xxhash.xxh3_64_intdigest(m.id.encode()) for m in ordered))

    @classmethod
    def of(cls, rack: str, members: Iterable[Member], replicas: int = 1) -> Ring:
        return cls(rack, tuple(members), replicas)

    @cached_property
    def owning(self) -> tuple[int, ...]:
        """Positions of the members that own shards: those that are not draining."""
        return tuple(i for i, member in enumerate(self.members) if member.state == "up")

    def owners(self, digest: Digest, n: int | None = None) -> tuple[Member, ...]:
        """Return the ``n`` members (default ``replicas``) that should hold the shard, the first choice first."""
        row = np.frombuffer(digest, np.uint8)[None]
        ranked = self.rank(row, len(self.owning) if n is None else n)[0]
        wanted = self.replicas if n is None else n
        return tuple(self.members[int(i)] for i in ranked[:wanted] if i >= 0)

    def rank(self, digests: U8, n: int) -> I32:
        """Return ``(shards, n)`` positions in ``members``, best first, for digests ``(shards, 32)``; -1 where none."""
        ranked = np.full((len(digests), n), -1, np.int32)
        if not self.owning or not len(digests) or n < 1:
            return ranked
        rows_max = max(DRAWS_MAX // len(self.owning), 1)
        if len(digests) > rows_max:
            return np.concatenate(
                [self.rank(digests[at : at + rows_max], n) for at in range(0, len(digests), rows_max)]
            )
        words = np.ascontiguousarray(digests[:, :8]).view("<u8").reshape(-1)
        draws = np.empty((len(self.owning), len(digests)))
        rows_at_once = max(DRAWS_AT_ONCE // len(digests), 1)  # so that all steps of the hash stay in the CPU's cache
        for first in range(0, len(self.owning), rows_at_once):
            at_once = self.owning[first : first + rows_at_once]
            hashed = xxh3_of_words(words, [self._seeds[at] for at in at_once])
            uniform = (hashed.astype(np.float64) + 0.5) / 2.0**64
            weights = np.asarray([self.members[at].weight for at in at_once])
            np.divide(-np.log(uniform), weights[:, None], out=draws[first : first + len(at_once)])
        take = min(n, len(self.owning))
        best = np.argmin(draws, axis=0)[None] if take == 1 else _smallest(draws, take)
        ranked[:, :take] = np.asarray(self.owning, np.int32)[best].T
        return ranked


def _smallest(draws: npt.NDArray[np.float64], take: int) -> npt.NDArray[np.intp]:
    """Return the rows of the ``take`` smallest of each column, ascending. Sorting all of them takes 5 times as long."""
    if take < len(draws):
        rows = np.sort(np.argpartition(draws, take - 1, axis=0)[:take], axis=0)
        order = np.argsort(np.take_along_axis(draws, rows, 0), axis=0, kind="stable")
        return np.take_along_axis(rows, order, 0)
    return np.argsort(draws, axis=0, kind="stable")


_PRIME: Final = np.uint64(0x9FB21C651E98DF25)
_SECRET: Final = 0x1CAD21F72C81017C ^ 0xDB979083E96DD4DE  # bytes 8..24 of XXH3's default secret
_MASK: Final = 2**64 - 1


def xxh3_of_words(words: npt.NDArray[Any], seeds: Sequence[int]) -> U64:
    """Return XXH3-64 of each word's eight bytes (little-endian) with each seed: ``(seeds, words)``.

    Yann Collet's algorithm for 4-8 bytes.
    """
    secrets = []
    for seed in seeds:
        seed ^= int.from_bytes((seed & 0xFFFFFFFF).to_bytes(4, "little"), "big") << 32
        secrets.append((_SECRET - seed) & _MASK)
    words = words.astype(np.uint64, copy=False)
    swapped = (words >> np.uint64(32)) + (words << np.uint64(32))
    keyed = swapped ^ np.asarray(secrets, np.uint64)[:, None]
    keyed ^= _rotate(keyed, 49) ^ _rotate(keyed, 24)
    keyed *= _PRIME
    keyed ^= (keyed >> np.uint64(35)) + np.uint64(8)
    keyed *= _PRIME
    keyed ^= keyed >> np.uint64(28)
    return keyed


def _rotate(values: U64, bits: int) -> U64:
    return (values << np.uint64(bits)) | (values >> np.uint64(64 - bits))


prepare(Member)
