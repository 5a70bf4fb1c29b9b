"""What one client address may cost: how much it may hold at once, and how fast it may cause work.

Invariant: an address may hold at most three times what is still free afterwards (dynamic thresholds, Choudhury and
Hahne 1998). A single address gets three quarters of a resource; n greedy addresses converge to 3/(3n+1) of it each, as
they release what they held before; and 30 that each hold a little can use all of it. So no address has a fixed share,
and a new address always finds room. With tokens the accounts are those of tenants, and a quota class may have a weight
other than 1: w times as much for an account of weight w, so that busy tenants share in proportion to their weights.

Costs that are known only afterwards (seconds, evictions) are token buckets: what was spent is charged, and an address
in debt is refused until the debt is paid off. Pure but for a lock: the caller has the clock.
"""

from __future__ import annotations

import contextlib
import ipaddress
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from quiver.errors import OverCapacity

ADDRESSES_MAX: Final = 4096  # remembered while they hold nothing; the least recently seen is forgotten first
FREE_SHARE: Final = 3  # an address may hold this many times what is still free
RETRY_SECONDS: Final = 1.0
RETRY_SECONDS_MAX: Final = 30.0
GIB: Final = 1 << 30


class Resource(StrEnum):
    """What is held for a time and released."""

    CONNECTIONS = "connections"
    ARRIVING = "arriving"  # connections without a complete request yet, and requests without a complete body
    BODY_BYTES = "body_bytes"  # of requests, in memory
    READS = "reads"  # being answered
    WAITING = "waiting"  # reads and fills that wait for a fill, an upload or a manifest
    SENDS = "sends"  # threads that take requests off streams and send answers
    OPEN_FILES = "open_files"  # of answers to reads, from their lookup until they are sent: a descriptor and a mapping
    FILES = "files"  # whole shards and manifests being sent
    UPLOADS = "uploads"
    UPLOAD_BYTES = "upload_bytes"  # of disk, reserved by them
    REPORTS = "reports"
    STREAMS = "streams"
    LOOKUPS = "lookups"  # manifests requested from peers
    SOCKET_CONNECTIONS = "socket_connections"  # at the Unix socket, per user
    SOCKET_REQUESTS = "socket_requests"


class Cost(StrEnum):
    """What is spent, and regained with time."""

    WORK_SECONDS = "work_seconds"  # of a thread that reads or hashes because a request said so
    EVICTIONS = "evictions"
    LOOKUPS = "lookups"  # of manifests, at peers
    HANDSHAKES = "handshakes"  # of TLS
    RECHECK_BYTES = "recheck_bytes"  # of shards, read again from disk because a reader says that they are wrong


class RefillRate(NamedTuple):
    """A token bucket: how much is regained per second, and how much it holds at most."""

    per_second: float
    burst: float


# A host has 64 readers and more, each with a request or two under way at each daemon, and all have one address; the 30
# daemons of a rack fill four shards each.
HELD_MAX: Final[Mapping[Resource, int]] = {
    Resource.CONNECTIONS: 16384,  # 2,000 readers with a few each; half of the open files allowed, if that is less
    Resource.ARRIVING: 4096,  # a job's processes begin at once; a quarter of the open files allowed, if that is less
    Resource.BODY_BYTES: GIB // 4,  # a read of a batch has some kilobytes
    Resource.READS: 4096,  # every reader of a rack at once; each is a request's body, which is bounded, and no thread
    Resource.WAITING: 4096,  # each is a coroutine and a request's body
    Resource.SENDS: 16,  # each is a thread of the poller, which serves one connection for a stint
    # A quarter of the open files allowed, and half of the mappings, if that is less (``Listening``). A batch of 256
    # samples spread over three daemons names 85 shards at each: 380 such answers at once.
    Resource.OPEN_FILES: 32768,
    Resource.FILES: 128,
    Resource.UPLOADS: 16,
    Resource.UPLOAD_BYTES: 6 * GIB,  # 16 shards of one sample each at their largest, and one manifest at its largest
    Resource.REPORTS: 64,
    Resource.STREAMS: 8192,  # 2,000 readers with a few each; a quarter of the open files allowed, if that is less
    Resource.LOOKUPS: 32,
    Resource.SOCKET_CONNECTIONS: 2048,  # a process of a training job has one or two, and a host has 512 processes
    Resource.SOCKET_REQUESTS: 1024,
}
RATES: Final[Mapping[Cost, RefillRate]] = {
    Cost.WORK_SECONDS: RefillRate(1.0, 30.0),  # one of the daemon's cores; a reader that got wrong bytes asks for 30 ms
    Cost.EVICTIONS: RefillRate(20.0, 1200.0),
    Cost.RECHECK_BYTES: RefillRate(4 << 20, GIB // 4),  # eight shards of the default size, and then one in 8 s
    Cost.HANDSHAKES: RefillRate(500.0, 8192.0),  # a core does 2,000 in a second; a host's readers begin at once
    Cost.LOOKUPS: RefillRate(2.0, 64.0),  # one per dataset that is opened, if nobody put its manifest here
}


class _Account:
    """What one address holds and has spent."""

    __slots__ = ("buckets", "held", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.held: dict[Resource, int] = {}
        self.buckets: dict[Cost, tuple[float, float]] = {}  # what was left, and when that was


class Budgets:
    """The accounts of all addresses. Safe from threads; no call waits for anything.

    ``hold`` and ``spend`` answer at once. A caller that refuses because of them raises ``OverCapacity`` (``refusal``),
    or answers something cheaper. Refusals are counted here, for ``/metrics``.
    """

    def __init__(
        self,
        held_max: Mapping[Resource, int] = HELD_MAX,
        rates: Mapping[Cost, RefillRate] = RATES,
        addresses_max: int = ADDRESSES_MAX,
        weight_of: Callable[[str], float] = lambda _: 1.0,
    ) -> None:
        """``weight_of`` an account: it may hold and spend so many times as much as others."""
        self.held_max = dict(held_max)
        self.weight_of = weight_of
        self.rates = dict(rates)
        self.used: Counter[Resource] = Counter()
        self.refused: Counter[str] = Counter({str(limit): 0 for limit in (*Resource, *Cost)})
        self._addresses_max = addresses_max
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        used = ", ".join(f"{what}={count}" for what, count in self.used.items() if count)
        return f"Budgets({len(self._accounts)} addresses, {used or 'nothing held'})"

    def __len__(self) -> int:
        return len(self._accounts)

    # -- held ---------------------------------------------------------------------------------------------------------

    def hold(self, address: str, what: Resource, amount: int = 1, *, counted: bool = True) -> bool:
        """Hold ``amount`` more until ``release``; return whether this address may hold that much.

        ``counted``: a refusal is one that the client sees.
        """
        with self._lock:
            account = self._account(address)
            mine, free = account.held.get(what, 0), self.held_max[what] - self.used[what]
            if amount > free or mine + amount > FREE_SHARE * account.weight * (free - amount + 1):
                self.refused[what] += counted
                return False
            account.held[what] = mine + amount
            self.used[what] += amount
            return True

    def release(self, address: str, what: Resource, amount: int = 1) -> None:
        with self._lock:
            account = self._accounts[address]  # never forgotten while it holds something
            left = account.held.pop(what, 0) - amount
            self.used[what] -= amount
            if left:
                account.held[what] = left

    @contextlib.contextmanager
    def holding(self, address: str, what: Resource, amount: int = 1) -> Iterator[None]:
        """Hold ``amount`` until the end of the block. Raises ``OverCapacity``."""
        if not self.hold(address, what, amount):
            raise self.refusal(what)
        try:
            yield
        finally:
            self.release(address, what, amount)

    def held(self, address: str, what: Resource) -> int:
        with self._lock:
            account = self._accounts.get(address)
            return account.held.get(what, 0) if account is not None else 0

    # -- spent --------------------------------------------------------------------------------------------------------

    def spend(self, address: str, what: Cost, amount: float, now: float) -> bool:
        """Charge ``amount`` unless the address is in debt; return whether it was charged. A charge may cause debt."""
        with self._lock:
            left = self._left(address, what, now)
            if left <= 0:
                self.refused[what] += 1
                return False
            self._accounts[address].buckets[what] = (left - amount, now)
            return True

    def charge(self, address: str, what: Cost, amount: float, now: float) -> None:
        """Charge what was caused already, debt or not. Debt is bounded by a burst, so that it ends."""
        with self._lock:
            left = max(self._left(address, what, now) - amount, -self._rate(address, what).burst)
            self._accounts[address].buckets[what] = (left, now)

    def left(self, address: str, what: Cost, now: float) -> float:
        """Return what the address may still spend; 0 or less: it is refused."""
        with self._lock:
            return self._left(address, what, now)

    def refusal(self, what: Resource | Cost, address: str = "", now: float = 0.0) -> OverCapacity:
        """Return the error for the client; for a cost, with the time after which it may spend again."""
        if isinstance(what, Cost):
            with self._lock:
                per_second = self._rate(address, what).per_second
                seconds = max(-self._left(address, what, now), 0.0) / per_second + RETRY_SECONDS
            return OverCapacity(
                f"this address has used up its budget ({what}); retry later", min(seconds, RETRY_SECONDS_MAX)
            )
        return OverCapacity(f"too much is under way for this address ({what}); retry", RETRY_SECONDS)

    # -- accounts -----------------------------------------------------------------------------------------------------

    def _rate(self, address: str, what: Cost) -> RefillRate:
        rate, weight = self.rates[what], self._account(address).weight
        return RefillRate(rate.per_second * weight, rate.burst * weight)

    def _left(self, address: str, what: Cost, now: float) -> float:
        rate = self._rate(address, what)
        left, at = self._account(address).buckets.get(what, (rate.burst, now))
        return min(left + max(now - at, 0.0) * rate.per_second, rate.burst)

    def _account(self, address: str) -> _Account:
        account = self._accounts.get(address)
        if account is None:
            self._forget()
            account = self._accounts[address] = _Account(self.weight_of(address))
        else:
            self._accounts.move_to_end(address)
        return account

    def _forget(self) -> None:
        """Forget the least recently seen ones that hold nothing; the limits bound the others."""
        for _ in range(len(self._accounts)):
            if len(self._accounts) < self._addresses_max:
                return
            oldest, account = next(iter(self._accounts.items()))
            if account.held:
                self._accounts.move_to_end(oldest)
            else:
                del self._accounts[oldest]


def address_of(peer: object) -> str:
    """Return whose budget a socket's peer name falls under: its IPv4 address, or its IPv6 network of 64 bits.

    An IPv6 host can usually use any address of that network.
    """
    host = str(peer[0]) if isinstance(peer, tuple) and peer else ""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return "local"  # a Unix socket, or a connection that is gone
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), 64), strict=False))
