"""``quiver status``: one line per daemon, and the rack as a whole."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from quiver.errors import Forbidden, NotFound, QuiverError, Unauthenticated
from quiver.location import shown
from quiver.peer import PeerClient
from quiver.ring import Member
from quiver.sizes import format_size
from quiver.store import Kind, Store
from quiver.token_source import TokenSource
from quiver.wire import OK, NodeStatus
from quiver_client.cli.options import cache_option, json_option, print_json
from quiver_client.config import CacheConfig, EmbeddedCache, parse_cache
from quiver_client.operating.rack import ASKED_AT_ONCE, ring_of

FAILED = 1  # as the exit status


@click.command("status", epilog="Example: quiver status --cache http://node1:7717 --json")
@cache_option("~/.cache/quiver")
@json_option
def command(cache: CacheConfig | None, *, as_json: bool) -> int:
    """Print the members of a rack, what it holds, and what it has read from the origin.

    Exits 1 if a member of the ring cannot be reached.
    """
    config = cache or parse_cache(None)
    report = _embedded(config) if isinstance(config, EmbeddedCache) else _rack(config.urls)
    silent = sum(member["state"] == "unreachable" for member in report["members"])
    if as_json:
        print_json(report)
        return FAILED if silent else 0
    for member in report["members"]:
        held = f"{format_size(member['resident_bytes'])} of {format_size(member['capacity_bytes'])}"
        click.echo(f"{member['id']:20} {member['state']:12} {held:24} {member['url']}")
        for fault in member.get("faults", ()):
            click.echo(f"{'':20} {shown(fault, 400)}")
    total = f"{format_size(report['resident_bytes'])} of {format_size(report['capacity_bytes'])}"
    count = len(report["members"])
    if count:  # processes that share a folder do not count what they read together
        read = f"{format_size(report['origin_read_bytes'])} read from the origin"
        total = f"{count} member{'s' * (count != 1)}, {total}, {read}"
    click.echo(f"{report['rack']}: {total}")
    for member in report["members"]:
        for problem in filter(None, (member.get("error"), member.get("ring_problem"))):
            click.echo(f"{member['id']}: {problem}", err=True)
    return FAILED if silent else 0


def _rack(urls: tuple[str, ...]) -> dict[str, Any]:
    ring = ring_of(urls)
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        members = list(pool.map(_member, ring.members))
    totals = ("resident_bytes", "capacity_bytes", "origin_read_bytes")
    return {"rack": ring.rack, "members": members} | {name: sum(m[name] for m in members) for name in totals}


def _member(member: Member) -> dict[str, Any]:
    peer = PeerClient(member.url, node=member.certified_id, token=TokenSource.from_environment())
    try:
        status = peer.status()
        return {
            "id": member.id,
            "url": member.url,
            "state": _state(status),
            "resident_bytes": status.resident_bytes,
            "capacity_bytes": status.capacity_bytes,
            "origin_read_bytes": status.origin_read_bytes,
            "served_bytes": status.served_bytes,
            "shards": status.shards,
            "disk": status.disk,
            "origins": status.origins,
            "faults": status.faults,
            "ring_members": status.ring_members,
            "ring_age_seconds": status.ring_age_seconds,
            "ring_problem": status.ring_problem,
        }
    except (Unauthenticated, Forbidden):
        raise  # no rack has members that refuse the token and others that do not: one line is enough
    except QuiverError as error:
        nothing = {"resident_bytes": 0, "capacity_bytes": 0, "origin_read_bytes": 0}
        return {"id": member.id, "url": member.url, "state": "unreachable", **nothing, "error": str(error)}
    finally:
        peer.close()


def _state(status: NodeStatus) -> str:
    """Return a word for a daemon's state; its faults, a line each, say more."""
    if status.disk != OK:
        return "disk failed"
    return "origin failed" if status.faults else status.state


def _embedded(cache: EmbeddedCache) -> dict[str, Any]:
    if not (cache.root / Kind.SHARD).is_dir():
        raise NotFound(f"there is no cache in {cache.root}; name another one with --cache, or use it first")
    store = Store.open(cache.root, cache.capacity_bytes, shared=True)
    resident = store.resident_bytes()
    store.close()
    totals = {"resident_bytes": resident, "capacity_bytes": cache.capacity_bytes, "origin_read_bytes": 0}
    return {"rack": f"embedded cache {cache.root}", "members": []} | totals
