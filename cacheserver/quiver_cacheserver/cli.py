"""Where ``quiver-cacheserver`` starts. What it needs is imported in here, so that what is missing is one line."""

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
