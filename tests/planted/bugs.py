"""All planted bugs."""

from __future__ import annotations

from typing import Final

from tests.planted import client, daemon, kernel
from tests.planted.plant import Planted

BUGS: Final[tuple[Planted, ...]] = (*kernel.BUGS, *daemon.BUGS, *client.BUGS)
