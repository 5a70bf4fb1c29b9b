"""What trainers do in the loops that they put around a loader's, found out from the calling frames.

A loader is not told what wraps it, and two wrappers do what changes the meaning of a call. The names of their modules
and functions are here, and ``tests/trainers`` runs the real packages; an unknown wrapper is taken for a plain loop.
"""

from __future__ import annotations

from types import FrameType
from typing import Final

COUNTS: Final = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")
READS_AHEAD: Final = ("ray.train.",)


def counts_passes(asking: FrameType | None) -> bool:
    """Whether ``set_epoch``'s caller counts the passes of its own wrapper, from 0 after each restart: Fabric does.

    The loader counts its passes itself, and goes on where a loaded state says.
    """
    return is_counter(asking.f_back if asking is not None else None)


def is_counter(asking: FrameType | None) -> bool:
    """Whether ``__iter__``'s caller is such a wrapper."""
    return asking is not None and asking.f_globals.get("__name__") in COUNTS


def reads_one_ahead(asking: FrameType | None) -> bool:
    """Whether ``__iter__``'s caller asks for each batch before it hands out the one before: Ray Train does."""
    return asking is not None and str(asking.f_globals.get("__name__")).startswith(READS_AHEAD)
