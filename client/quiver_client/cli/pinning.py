"""What ``quiver pin``, ``unpin`` and ``evict`` share: every daemon of the rack is told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from quiver.errors import BadRequest, QuiverError
from quiver.overview import DatasetRequest, EvictAnswer, PinAnswer
from quiver.peer import PeerClient
from quiver.sizes import format_size
from quiver_client.cli.operating import Members, ask_datasets, members, say_problems
from quiver_client.cli.options import print_json
from quiver_client.config import CacheConfig
from quiver_client.operating.finding import dataset_called
from quiver_client.operating.merging import Dataset
from quiver_client.operating.rack import Asked, ask_all

T = TypeVar("T", bound=PinAnswer | EvictAnswer)
Verb = Callable[[PeerClient, DatasetRequest], T]

FAILED = 1  # as the exit status: some daemon did not do it


def found(cache: CacheConfig | None, name: str) -> tuple[Members, Dataset]:
    """Return the daemons and the dataset of this name. Raises ``NotFound``."""
    to_ask = members(cache)
    datasets, _ = ask_datasets(to_ask)  # who does not answer is said once, of what is done
    return to_ask, dataset_called(name, datasets)


def tell(to_ask: Members, dataset: Dataset, verb: Verb[T]) -> Asked[T]:
    """Tell every daemon. Raises if none did it."""
    request = DatasetRequest(dataset.id, dataset.name, dataset.size_bytes)
    return ask_all(to_ask, lambda peer: verb(peer, request))


def pin(cache: CacheConfig | None, name: str, *, as_json: bool) -> int:
    to_ask, dataset = found(cache, name)
    asked = tell(to_ask, dataset, PeerClient.pin)
    for member, error in asked.refusals.items():  # pinned here and evicted there is of no use to anybody
        _undo(to_ask, dataset)
        raise BadRequest(f"{dataset.name} is not pinned, since {member} has no room for it: {error}")
    resident = sum(answer.resident_bytes for answer in asked.values)
    missing = max(dataset.size_bytes - resident, 0)
    if as_json:
        said = {"dataset": dataset.name, "pinned_at": sorted(asked.answers), "resident_bytes": resident}
        print_json(said | {"missing": asked.problems})
        return FAILED if asked.errors else 0
    rest = f"; `quiver warm` fills the other {format_size(missing)}" if missing else ""
    click.echo(f"{dataset.name} is pinned: {format_size(resident)} of it are resident and stay{rest}")
    say_problems(asked.problems)
    return FAILED if asked.errors else 0


def unpin(cache: CacheConfig | None, name: str, *, as_json: bool) -> int:
    to_ask, dataset = found(cache, name)
    if not dataset.pinned_at:
        raise BadRequest(f"{dataset.name} is not pinned")
    asked = tell(to_ask, dataset, PeerClient.unpin)
    if as_json:
        print_json({"dataset": dataset.name, "unpinned_at": sorted(asked.answers), "missing": asked.problems})
    else:
        click.echo(f"{dataset.name} is no longer pinned")
        say_problems(asked.problems)
    return FAILED if len(asked.answers) < dataset.pinned_at else 0


def evict(cache: CacheConfig | None, name: str, *, yes: bool, as_json: bool) -> int:
    to_ask, dataset = found(cache, name)
    if dataset.pinned_at:
        raise BadRequest(f"{dataset.name} is pinned; `quiver unpin` it first")
    if dataset.reader_count and not yes:
        _confirm(dataset)
    asked = tell(to_ask, dataset, PeerClient.evict)
    evicted = sum(answer.evicted_bytes for answer in asked.values)
    kept = sum(answer.kept_bytes for answer in asked.values)
    if as_json:
        print_json({"dataset": dataset.name, "evicted_bytes": evicted, "kept_bytes": kept, "missing": asked.problems})
    else:
        shared = f"; {format_size(kept)} that other datasets in use share were kept" if kept else ""
        click.echo(f"{format_size(evicted)} of {dataset.name} were evicted{shared}")
        say_problems(asked.problems)
    return FAILED if asked.problems else 0


def _confirm(dataset: Dataset) -> None:
    """Ask on a terminal; elsewhere it is wrong usage. The jobs that read it do not fail: they read again."""
    count = dataset.reader_count
    who = f"{count} job{'s' * (count != 1)} read{'s' * (count == 1)} {dataset.name}"
    if not sys.stdin.isatty():
        raise click.UsageError(f"{who}, and would read it from the origin again; add --yes to evict it all the same")
    click.confirm(f"{who}, and will read it from the origin again. Evict it?", abort=True)


def _undo(to_ask: Members, dataset: Dataset) -> None:
    """Unpin where it was pinned just now, as far as possible."""
    if dataset.pinned_at:
        return  # it was pinned before: leave that as it was
    try:
        tell(to_ask, dataset, PeerClient.unpin)
    except QuiverError:
        return


def dataset_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.argument("name", metavar="DATASET")(command)
