"""The command ``quiver``. Each command is a module beside this one."""

from quiver_client.cli.main import main

__all__ = ["main"]
