"""``quiver probe``: have a running job measure what the cache is worth to it."""

from __future__ import annotations

import time
from typing import Any, Final

import click
import msgspec

from quiver.errors import BadRequest, NotFound, QuiverError, Unavailable
from quiver.identity import check_name
from quiver.overview import ProbeView
from quiver.peer import PeerClient
from quiver.ring import Member
from quiver.sizes import format_rate
from quiver.token_source import TokenSource
from quiver_client.cli.drain import Seconds
from quiver_client.cli.options import cache_option, json_option, print_json
from quiver_client.config import CacheConfig, EmbeddedCache
from quiver_client.operating.rack import ring_of

POLL_SECONDS: Final = 0.5
TIMEOUT_SECONDS: Final = 900.0  # twenty reads of a quarter of a second take a hundredth of eight minutes


def _named(ctx: click.Context, param: click.Parameter, value: str) -> str:
    try:
        if not value:
            raise ValueError("it is empty; `quiver jobs` lists the jobs that have a name")
        return check_name("JOB", value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


@click.command("probe", epilog="Example: quiver probe resnet-7 --cache http://node1:7717 --timeout 15min")
@click.argument("job", callback=_named)
@cache_option()
@click.option(
    "--timeout", metavar="TIME", type=Seconds(), default=TIMEOUT_SECONDS, help="When to give up. [default: 15min]"
)
@json_option
def command(job: str, cache: CacheConfig, timeout: float, *, as_json: bool) -> None:
    """Have rank 0 of JOB read twenty batches past the cache, and print how fast it is with and without hits.

    This takes at most 1 % of the job's time, so it may take minutes; the job's samples and their order do not change.
    Giving up, or interrupting this command, does not end the probes: ask again for the result.
    """
    if isinstance(cache, EmbeddedCache):
        raise click.BadParameter("a folder has no daemons: use DataLoader(probe=True)", param_hint="--cache")
    token = TokenSource.from_environment()
    ring = ring_of(cache.urls)
    peer, view = _first_that_knows(job, ring.members, token)
    before, ends_at = view.series, time.monotonic() + timeout
    try:
        while view.series <= before:
            if time.monotonic() >= ends_at:
                raise Unavailable(
                    f"job {job}", f"no result in {timeout:.0f} s: its loop is slow to probe, or is not a Quiver loader"
                )
            time.sleep(POLL_SECONDS)
            view = peer.probe(job)
    finally:
        peer.close()
    if not view.misses:
        raise QuiverError(f"job {job} could not be probed: its rank 0 cannot read the origin itself, or has no cache")
    if as_json:
        print_json(msgspec.to_builtins(view))
    else:
        click.echo(told(view))


def told(view: ProbeView) -> str:
    """Return a result, for people. Rates are those of the rank that probed."""
    rows: list[tuple[str, float]] = [
        ("if all is in the cache", view.hits),
        ("if nothing is", view.misses),
        ("estimated without probing", view.rate),
        ("reads now", view.throughput),
    ]
    return "\n".join([f"{view.job}, rank 0:", *(f"  {what:26} {format_rate(rate)}" for what, rate in rows)])


def _first_that_knows(job: str, members: tuple[Member, ...], token: Any) -> tuple[PeerClient, ProbeView]:
    """Ask the job for probes through the first daemon that hears of it. Every daemon hears all reports."""
    old, failure = 0, None
    for member in members:
        peer = PeerClient(member.url, node=member.certified_id, token=token)
        try:
            view = peer.probe(job, begin=True)
            if view.ranks:
                return peer, view
        except NotFound:
            old += 1
        except Unavailable as error:
            failure = error
        peer.close()
    if failure is not None:
        raise failure
    if old == len(members):
        raise BadRequest("these daemons are too old for this: they cannot ask a job for probes; update them")
    raise NotFound(
        f"no job called {job!r} reports to this cache now; `quiver jobs` lists those that do, and marks with (stock)"
        " the loaders that report nothing and cannot be probed"
    )
