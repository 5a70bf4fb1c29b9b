"""What a training script imports: ``Dataset`` and ``index``.

    from quiver_client import Dataset
    loader = torch.utils.data.DataLoader(Dataset("imagenet.quiver"), batch_size=256, shuffle=True, num_workers=8)

Loaded on first use, so that the ``quiver`` command does not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quiver_client.dataset import Dataset
    from quiver_client.indexing import index

__all__ = ["Dataset", "index"]


def __getattr__(name: str) -> Any:
    if name == "Dataset":
        from quiver_client.dataset import Dataset

        return Dataset
    if name == "index":
        from quiver_client.indexing import index

        return index
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
