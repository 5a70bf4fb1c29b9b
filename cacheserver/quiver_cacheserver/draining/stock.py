"""What a draining daemon holds, file by file, and the messages about some of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from quiver.digest import Digest
from quiver.domain import Domain
from quiver.handover import HOLDERS_MAX, SHARED, HandoverAnswer, HandoverRequest
from quiver.residency import Needs
from quiver.residency.worth import most_needed_first
from quiver.store import Kind
from quiver_cacheserver.draining import worth
from quiver_cacheserver.residency.rooms import Rooms

STOCK_MAX: Final = 1 << 18  # files that one drain hands over: 8 TiB in shards of the default size
ANSWER_SECONDS: Final = 0.5  # after which a receiver says how far it is

Key = tuple[Kind, Digest, Domain]


class Item(NamedTuple):
    """A file to hand over, in one sharing domain. ``holder``: the account that it is kept for, ``""`` for several."""

    kind: Kind
    digest: Digest
    size_bytes: int
    domain: Domain
    holder: str = ""

    @property
    def key(self) -> Key:
        return self.kind, self.digest, self.domain


def stock_of(rooms: Rooms, needs: Needs) -> list[Item]:
    """In a thread: return what is held, manifests first (a receiver can go on filling by them), then by need."""
    inventory, holders = rooms.store.inventory, rooms.holders.names()
    items: list[Item] = []
    for held in inventory.held(Kind.MANIFEST)[: STOCK_MAX // 2]:
        items += [Item(Kind.MANIFEST, *held[:2], it) for it in inventory.domains_of(Kind.MANIFEST, held.digest)]
    shelf = rooms.shelf()
    order = most_needed_first(worth.of_held(needs, shelf), shelf.idle)
    for at in order[: STOCK_MAX - len(items)].tolist():
        digest, size_bytes = shelf.name(at), int(shelf.sizes[at])
        holder = holders.get(int(shelf.holders[at]), "")
        domains = inventory.domains_of(Kind.SHARD, digest)
        items += [Item(Kind.SHARD, digest, size_bytes, domain, holder) for domain in domains]
    return items


def alike(stock: Sequence[Item], wanted: Iterable[int], count_max: int) -> Iterator[list[int]]:
    """Yield the wanted items in batches of one kind and domain each."""
    batches: dict[tuple[Kind, Domain], list[int]] = {}
    for at in wanted:
        batch = batches.setdefault((stock[at].kind, stock[at].domain), [])
        batch.append(at)
        if len(batch) == count_max:
            yield batches.pop((stock[at].kind, stock[at].domain))
    yield from batches.values()


def request_about(giver: str, items: Sequence[Item], *, take: bool = False) -> HandoverRequest:
    """Return the request about items of one kind: to say which are held, or to take them."""
    files, wait_ms = tuple(it.digest for it in items), int(1000 * ANSWER_SECONDS) if take else 0
    if items[0].kind is Kind.MANIFEST:
        return HandoverRequest(giver, manifests=files, take=take, wait_ms=wait_ms)
    if not take:
        return HandoverRequest(giver, files)
    holders = list(dict.fromkeys(it.holder for it in items if it.holder))[:HOLDERS_MAX]
    number = {holder: at + 1 for at, holder in enumerate(holders)}
    return HandoverRequest(
        giver,
        files,
        tuple(it.size_bytes for it in items),
        take=True,
        wait_ms=wait_ms,
        holders=tuple(holders),
        holder_of=tuple(number.get(it.holder, SHARED) for it in items),
    )


def statuses_in(answer: HandoverAnswer) -> bytes:
    """Return the statuses of the answer to a request about one kind."""
    return answer.shards or answer.manifests
