"""Prepares message types for threads, when their module is imported.

``msgspec`` learns the fields of a struct when it is first decoded, and other threads see the half-learned type
meanwhile: two threads that decode the first message of a type at once can end the process with SIGSEGV (seen in 0.22).
A type that was prepared is never learned again. So a module that defines messages prepares them; a test finds those
that do not.
"""

from __future__ import annotations

from typing import Any

import msgspec


def prepare(*kinds: Any) -> None:
    """Have these types, and all types in them, ready to be decoded in any thread."""
    for kind in kinds:
        msgspec.json.Decoder(kind)
