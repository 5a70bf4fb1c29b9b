"""The group of commands. An error becomes one line and exit status 1, or 2 for wrong usage.

A command is a module here with a click command named ``command``, which is imported on use, so that ``quiver info``
does not wait for torch.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import Final

import click

from quiver import __version__
from quiver.errors import QuiverError
from quiver.extras import what_is_missing

COMMANDS: Final = {
    "index": "Make a manifest of a dataset, where it lies.",
    "info": "Print what a manifest contains.",
    "verify": "Read and hash everything again, through a cache.",
    "warm": "Fill a dataset into a cache before it is needed.",
    "plan": "Predict, by simulation, what a fleet of racks gives its jobs.",
    "place": "Say which rack should run which job.",
    "probe": "Measure what the cache is worth to a running job.",
    "status": "Say how a cache is doing.",
    "jobs": "Show who reads from a rack, how fast, and how long it waits.",
    "datasets": "Show what a rack holds of each dataset, and who reads it.",
    "explain": "Say why a job is as fast as it is, and what more cache would change.",
    "pin": "Keep a dataset in the cache.",
    "unpin": "Let a dataset be evicted again.",
    "evict": "Remove a dataset from the cache.",
    "drain": "Have a daemon hand over what it holds.",
    "undrain": "Bring a drained daemon back.",
    "tls": "Make certificates for a rack.",
    "token": "Make keys and sign tokens for a shared rack.",
}
FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130


class _Commands(click.Group):
    """Commands that are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"quiver_client.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


def _version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    """Print the version, and whether native code is in use."""
    if asked and not ctx.resilient_parsing:
        from quiver_client import native

        how = (
            "batches by native code"
            if native.pieces is not None
            else "batches in Python: native code was not built, or is turned off"
        )
        click.echo(f"quiver, version {__version__} ({how})")
        ctx.exit()


@click.command(
    cls=_Commands,
    context_settings={"auto_envvar_prefix": "QUIVER", "help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Example: quiver index /data/imagenet/train -o imagenet.quiver",
)
@click.option(
    "--version", help="Show the version and exit.", is_flag=True, is_eager=True, expose_value=False, callback=_version
)
def quiver() -> None:
    """A cache that keeps GPUs fed with training data."""


def run(arguments: list[str]) -> int:
    """Run the command line; return the exit status."""
    logging.getLogger("quiver_client").setLevel(logging.ERROR)  # the commands' own reports say what matters
    try:
        return int(quiver.main(arguments, prog_name="quiver", standalone_mode=False) or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else error.format_message(), err=True)
        return WRONG_USE
    except click.UsageError as error:
        where = f"{error.ctx.command_path}: " if error.ctx else ""
        hint = f" (see `{error.ctx.command_path} --help`)" if error.ctx else ""
        return _say(f"{where}{error.format_message()}{hint}", WRONG_USE)
    except click.ClickException as error:
        return _say(error.format_message(), FAILED)
    except BrokenPipeError:  # the reader of the output, such as head, closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except ModuleNotFoundError as error:
        return _say(what_is_missing(error, f"quiver {arguments[0]}", "client"), FAILED)
    except (QuiverError, OSError) as error:
        return _say(str(error) or type(error).__name__, FAILED)
    except (KeyboardInterrupt, click.Abort):
        return _say("interrupted", INTERRUPTED)


def _say(message: str, status: int) -> int:
    click.echo("error: " + " ".join(message.splitlines()), err=True)
    return status
