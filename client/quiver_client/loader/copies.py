"""What a pickled or deep-copied loader is: its attributes, and the arguments and the state of its order.

A loader's threads, its workers, and what its order knows of the cache belong to the process that has them. A copy makes
its own, so trainers may send a loader to the processes that they spawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from quiver_client.loader.sampler import BatchSampler
from quiver_client.loader.trainers.own_methods import NAMES

ORDER: Final = "order"
_MADE: Final = frozenset(
    {
        *("batch_sampler", "sampler", "epoch", "_iterator"),
        *("_source", "_passing", "_seen", "_watch", "_making", "_prober", "_line"),
        *NAMES,
    }
)


def described(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a loader's attributes a copy is made of."""
    order: BatchSampler = attributes[ORDER]
    kept = {name: value for name, value in attributes.items() if name not in _MADE}
    return {**kept, ORDER: (type(order), order.arguments, order.state_dict())}


def order_again(description: tuple[type[BatchSampler], Mapping[str, Any], Mapping[str, Any]]) -> BatchSampler:
    """Return an order of its own that goes on where the copied one was."""
    kind, arguments, state = description
    order = kind(**arguments)
    if state != order.state_dict():  # a copy of one that was not begun begins as a new one does, in any rank
        order.load_state_dict(state)
    return order
