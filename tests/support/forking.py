"""A fork server that has imported what daemons and training scripts need."""

from __future__ import annotations

import multiprocessing
from typing import Final

FORKED: Final = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        *("quiver_cacheserver.cli", "quiver_cacheserver.command", "quiver_cacheserver.serve"),
        "quiver_cacheserver.serving.app",
        *("quiver_client.dataset", "quiver_client.loader", "torch.utils.data"),
    ]
)
