"""The key-value store that the ranks of torch.distributed share.

Values of a few hundred bytes go through it, and no collective: a rank that does not take part delays nobody, the calls
need no device, and they may come from any thread.
"""

from __future__ import annotations

from typing import Any

import torch.distributed


def group_store() -> Any:
    """Return the store, ``None`` if there is no process group, or if it has none."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    get_store = getattr(distributed.distributed_c10d, "_get_default_store", None)  # torch has no public name for it
    return get_store() if get_store is not None else None
