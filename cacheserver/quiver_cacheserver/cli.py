"""The entry point of ``quiver-cacheserver``. It imports lazily, so that a missing package is a one-line error."""

from __future__ import annotations

import sys

from quiver.extras import what_is_missing


def main() -> None:
    """Run the daemon's command; exit as ``command.main`` does."""
    try:
        from quiver_cacheserver import command
    except ModuleNotFoundError as error:
        sys.exit(f"error: {what_is_missing(error, 'quiver-cacheserver', 'server')}")
    command.main()


if __name__ == "__main__":
    main()
