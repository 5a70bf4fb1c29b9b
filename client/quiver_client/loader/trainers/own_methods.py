"""A loader's own methods as attributes of the object, for wrappers that copy a loader's ``__dict__`` and not its class.

Fabric's and Ray Train's wrappers do so: of torch's loader, whose state is its attributes, such a copy has all there is.
Ours has methods beyond torch's, and a training loop calls them on what the trainer returned. They refer to the loader
weakly, so that it does not keep itself alive (a wrapper keeps the loader that it wraps), and they call the method of
the loader's class, so that a subclass may override it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Final

NAMES: Final = ("state_dict", "load_state_dict", "set_epoch", "close")


def own_methods(loader: Any) -> dict[str, Callable[..., Any]]:
    """Return the methods by name."""
    return {name: _bound(weakref.ref(loader), loader.order, getattr(type(loader), name)) for name in NAMES}


def _bound(refer: weakref.ref[Any], order: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        loader = refer()
        if loader is None:  # as in DataLoader(...).load_state_dict(state): what it does, it does to the order
            return getattr(order, method.__name__)(*args, **named)
        return method(loader, *args, **named)

    return call
