"""What a training script imports: ``Dataset``, ``DataLoader``, ``BatchSampler``, ``merge_states`` and ``index``.

    from quiver_client import DataLoader, Dataset
    loader = DataLoader(Dataset("imagenet.quiver"), batch_size=256, shuffle=True)

Loaded on first use, so that the ``quiver`` command does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from quiver.extras import what_is_missing

if TYPE_CHECKING:
    from quiver_client.dataset import Dataset
    from quiver_client.indexing import index
    from quiver_client.loader.dataloader import DataLoader
    from quiver_client.loader.sampler import BatchSampler
    from quiver_client.loader.state import merge_states

__all__ = ["BatchSampler", "DataLoader", "Dataset", "index", "merge_states"]

_HOME: Final = {
    "BatchSampler": "quiver_client.loader.sampler",
    "DataLoader": "quiver_client.loader.dataloader",
    "Dataset": "quiver_client.dataset",
    "index": "quiver_client.indexing",
    "merge_states": "quiver_client.loader.state",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        raise ImportError(what_is_missing(error, f"quiver_client.{name}", "client")) from error
