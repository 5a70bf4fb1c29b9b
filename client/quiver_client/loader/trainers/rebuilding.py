"""The arguments of an order, for trainers that make it again with another sampler (see ``injected``)."""

from __future__ import annotations

from typing import Any, Final, TypeVar

Order = TypeVar("Order", bound=type)
_NONE: Final[dict[str, Any]] = {"__pl_saved_args": (), "__pl_saved_default_kwargs": {}, "__pl_saved_arg_names": ()}


def rebuildable(order: Order) -> Order:
    """Let Lightning make objects of this class again: decorates a class whose objects have their ``_arguments``."""
    for name, value in _NONE.items():
        setattr(order, name, value)
    setattr(order, "__pl_saved_kwargs", property(_copied))
    return order


def _copied(order: Any) -> dict[str, Any]:
    return dict(order._arguments)  # Lightning writes into it
