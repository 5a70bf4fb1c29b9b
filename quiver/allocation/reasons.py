"""Why a dataset has the share that it has, in words for operators."""

from __future__ import annotations

from quiver.allocation.instance import Floats, Instance
from quiver.allocation.values import Policy
from quiver.sizes import format_size


def reasons(instance: Instance, policy: Policy, cached: Floats, full: Floats) -> list[str]:
    """Return a sentence for each dataset whose readers want the rates ``full``."""
    demand = instance.demand(full)
    words = []
    for demanded, kept, size in zip(demand.tolist(), cached.tolist(), instance.sizes.tolist(), strict=True):
        words.append(
            f"{policy}: reads at most {format_size(demanded)}/s; {format_size(kept)} of {format_size(size)} kept"
        )
    return words
