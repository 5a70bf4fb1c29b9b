"""Finds what a person named among jobs and datasets. Pure.

An unknown or ambiguous name is an error of one line, which says what there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from quiver.errors import BadRequest, NotFound
from quiver_client.operating.merging import Dataset, Job

NAMES_SHOWN_MAX: Final = 8


def dataset_called(name: str, datasets: Sequence[Dataset]) -> Dataset:
    """Return the dataset of this name, or with this id. Raises ``NotFound``."""
    found = next((it for it in datasets if it.name == name), None) or next(
        (it for it in datasets if it.id == name), None
    )
    if found is None:
        raise NotFound(f"no dataset is called {name!r}; {_there_are('dataset', (it.name for it in datasets))}")
    return found


def jobs_called(name: str, jobs: Sequence[Job], tenant: str | None = None) -> list[Job]:
    """Return the entries of the job of this name, one for each dataset that it reads; none if there is no such job.

    Raises ``BadRequest`` if jobs of several tenants are called this.
    """
    found = [it for it in jobs if it.job == name and tenant in (None, it.tenant)]
    tenants = sorted({it.tenant for it in found})
    if len(tenants) > 1:
        each = ", ".join(it or '""' for it in tenants)
        raise BadRequest(f"several tenants have a job called {name!r}: {each}; name one with --tenant")
    return found


def subject_called(
    name: str, jobs: Sequence[Job], datasets: Sequence[Dataset], tenant: str | None = None
) -> list[Job] | Dataset:
    """Return the job or the dataset of this name. Raises ``NotFound``, and ``BadRequest`` if it is ambiguous."""
    its = jobs_called(name, jobs, tenant)
    dataset = next((it for it in datasets if name in (it.name, it.id)), None)
    if its and dataset is not None and tenant is None:
        raise BadRequest(
            f"{name!r} is a job and a dataset; write --tenant for the job, or {dataset.id} for the dataset"
        )
    if its:
        return its
    if dataset is not None and tenant is None:
        return dataset
    raise NotFound(
        f"no job or dataset is called {name!r}; {_there_are('job', (it.job for it in jobs))};"
        f" {_there_are('dataset', (it.name for it in datasets))}"
    )


def _there_are(what: str, names: Iterable[str]) -> str:
    known = sorted(set(filter(None, names)))
    if not known:
        return f"there is no named {what}"
    more = len(known) - NAMES_SHOWN_MAX
    listed = ", ".join(known[:NAMES_SHOWN_MAX])
    return f"there {'is' if len(known) == 1 else 'are'} {what}{'s' * (len(known) != 1)} {listed}" + (
        f" and {more} more" if more > 0 else ""
    )
