"""``quiver drain``: have a daemon hand over what only it holds, before its machine is taken away."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import click
import msgspec

from quiver.errors import BadRequest, NotFound, QuiverError, Unavailable
from quiver.handover import DEADLINE_SECONDS_MAX, DrainRequest, DrainStatus
from quiver.peer import PeerClient
from quiver.ring import Member
from quiver.sizes import format_size
from quiver.token_source import TokenSource
from quiver_client.cli.options import cache_option, json_option, print_json
from quiver_client.cli.progress import byte_bar
from quiver_client.config import CacheConfig, EmbeddedCache
from quiver_client.operating.rack import ring_of

POLL_SECONDS: Final = 0.2
SILENT_SECONDS: Final = 10.0  # past the deadline, after which a daemon that still says it is handing over is given up
_SECONDS = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)\s*(s|m|min|h)?", re.ASCII)
_UNITS: Final = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


class Seconds(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic from click 8.2 on
    """A time as people write it, in seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = _SECONDS.fullmatch(str(value).strip())
        seconds = float(match[1]) * _UNITS[match[2] or "s"] if match else -1.0
        if not 0 <= seconds <= DEADLINE_SECONDS_MAX:
            self.fail(f"not a time: {str(value)[:40]!r}; write it like 30s or 2min, at most 24h", param, ctx)
        return seconds


@click.command("drain", epilog="Example: quiver drain n3 --cache http://node1:7717 --deadline 30s")
@click.argument("node")
@cache_option()
@click.option(
    "--deadline", metavar="TIME", type=Seconds(), default=30.0, help="When to end, like 30s or 2min. [default: 30s]"
)
@json_option
def command(node: str, cache: CacheConfig, deadline: float, *, as_json: bool) -> None:
    """Take the daemon NODE out of placement and have it hand over what no other member holds, most needed first.

    The daemon stays up, drained: it serves what it holds until it is stopped, or `quiver undrain NODE`. Interrupting
    this command does not end the drain. Exit with 1 if something was left when the deadline had passed.
    """
    with daemon_named(node, cache) as peer:
        status = peer.drain(DrainRequest(deadline))
        ends_at = time.monotonic() + deadline + SILENT_SECONDS
        with byte_bar(f"draining {node}") as progress:
            shown_bytes = -1
            while status.state == "draining":
                if time.monotonic() > ends_at:
                    raise Unavailable(node, "it still hands over, past its deadline; its log says more")
                if progress is not None and status.held_bytes:
                    if shown_bytes < 0:
                        progress.start(status.held_bytes)
                        shown_bytes = 0
                    done_bytes = status.held_bytes - status.left_bytes
                    progress.advance(max(done_bytes - shown_bytes, 0))
                    shown_bytes = max(done_bytes, shown_bytes)
                time.sleep(POLL_SECONDS)
                status = peer.drain_status()
    if as_json:
        print_json(msgspec.to_builtins(status))
    else:
        click.echo(told(status))
    if status.state == "up":
        raise QuiverError(f"{node} owns shards again: somebody undrained it meanwhile")
    if status.left_bytes:
        raise QuiverError(f"{format_size(status.left_bytes)} were not handed over; repeat the command to go on")


def told(status: DrainStatus) -> str:
    """Return what a drain achieved, for people."""
    if status.why:
        return f"{status.id} is drained; nothing was handed over: {status.why}"
    lines = [
        f"{status.id} is {status.state}: handed over {format_size(status.handed_over_bytes)} of"
        f" {format_size(status.held_bytes)} in {status.elapsed_seconds:.1f} s",
        f"  held elsewhere already   {format_size(status.elsewhere_bytes)}",
    ]
    lines += [f"  to {name:21} {format_size(size)}" for name, size in sorted(status.receivers.items())]
    if status.refused_bytes:
        lines.append(f"  no room elsewhere for    {format_size(status.refused_bytes)}")
    if status.left_bytes:
        lines.append(f"  not handed over          {format_size(status.left_bytes)}")
    return "\n".join(lines)


@contextmanager
def daemon_named(node: str, cache: CacheConfig) -> Iterator[PeerClient]:
    """Yield a client of the rack's daemon of this node id. Raises ``NotFound`` naming the members that there are."""
    if isinstance(cache, EmbeddedCache):
        raise click.BadParameter("a folder has no daemons: write http://HOST:7717", param_hint="--cache")
    ring = ring_of(cache.urls)
    member = next((it for it in ring.members if it.id == node), None)
    if member is None:
        names = ", ".join(it.id for it in ring.members) or "none"
        raise NotFound(f"rack {ring.rack} has no member {node[:80]!r}; there are: {names}")
    peer = _client(member)
    try:
        yield peer
    except NotFound as error:
        raise BadRequest(f"{node} is too old for this: it knows no drains; send it SIGTERM, and update it") from error
    finally:
        peer.close()


def _client(member: Member) -> PeerClient:
    return PeerClient(member.url, node=member.certified_id, token=TokenSource.from_environment())
