"""The command ``quiver``. Each command is a module beside this one."""

from __future__ import annotations

import sys

from quiver.extras import what_is_missing

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit."""
    try:
        from quiver_client.cli.main import run
    except ModuleNotFoundError as error:
        sys.exit(f"error: {what_is_missing(error, 'quiver', 'client')}")
    sys.exit(run(sys.argv[1:]))
