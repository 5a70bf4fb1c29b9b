"""The command ``quiver-cacheserver``. Flags over ``QUIVER_*`` variables over the TOML file."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import msgspec
import uvloop

from quiver import __version__
from quiver.errors import QuiverError
from quiver_cacheserver.config import Config, check
from quiver_cacheserver.logs import log_to_stderr
from quiver_cacheserver.memory import return_freed_memory
from quiver_cacheserver.serve import serve

EXAMPLE = """\b
Example: three daemons of one rack, on three machines, with their ring in etcd:
  quiver-cacheserver --listen 0.0.0.0:7717 --data-dir /ssd/quiver --capacity 2TB \\
      --rack r7 --etcd http://etcd:2379 --origin /data/imagenet --origin s3://datasets/ \\
      --tls-ca ca.pem --tls-cert node-n1.pem --tls-key node-n1.key --token-keys /etc/quiver/token-keys
"""


def _from_toml(context: click.Context, _: click.Parameter, path: Path | None) -> Path | None:
    """Make the file's values the defaults, which flags and environment variables override."""
    if path is None:
        return None
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text())
    except OSError as error:
        raise click.UsageError(f"--config {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # also of text that is no UTF-8, and of huge numbers
        raise click.UsageError(f"--config {path}: {error}") from error
    known = set(Config.__struct_encode_fields__)
    unknown = sorted(set(values) - known)
    if unknown:
        raise click.UsageError(f"--config {path}: unknown key {unknown[0]!r}; known: {', '.join(sorted(known))}")
    if not isinstance(values.get("insecure", False), bool):
        raise click.UsageError(f"--config {path}: insecure is true or false")
    for name in ("origin", "etcd", "quota", "origin-rate"):
        if isinstance(values.get(name), str):
            values[name] = [values[name]]  # a single value need not be a list
        elif not isinstance(values.get(name, []), list):
            raise click.UsageError(f"--config {path}: {name} is a text in quotes, or a list of them")
    if isinstance(values.get("peers"), list):
        values["peers"] = ",".join(str(peer) for peer in values["peers"])
    tenants = values.pop("tenants", {})
    if not isinstance(tenants, dict):
        raise click.UsageError(f"--config {path}: write [tenants.NAME] and weight or quota below it")
    context.obj = tenants
    context.default_map = {key.replace("-", "_"): value for key, value in values.items()}
    return path


@click.command(
    epilog=EXAMPLE,
    context_settings={"auto_envvar_prefix": "QUIVER", "help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.option("--listen", metavar="HOST:PORT", default=Config().listen, show_default=True, help="Where to serve.")
@click.option("--advertise", metavar="URL", default="", help="The URL at which peers reach it. [default: guessed]")
@click.option("--data-dir", metavar="DIR", default="", help="Folder on local SSD for the shards.")
@click.option("--capacity", metavar="SIZE", default="", help="How much of that disk to use, like 200GiB.")
@click.option("--rack", metavar="NAME", default=Config().rack, show_default=True, help="Which ring to join.")
@click.option(
    "--node-id",
    metavar="ID",
    default="",
    help="Its name in the ring. [default: that of its certificate, or its address]",
)
@click.option("--etcd", metavar="URL", multiple=True, help="The etcd that keeps the ring; repeat for its members.")
@click.option("--peers", metavar="URL,…", default="", help="A ring without etcd: the URLs of all daemons.")
@click.option("--origin", metavar="PREFIX", multiple=True, help="A folder or URL below which it may read; repeatable.")
@click.option("--replicas", metavar="N", type=int, default=1, show_default=True, help="Copies of each shard.")
@click.option("--socket", metavar="PATH", default="", help="Pass open shards to readers on this host by this socket.")
@click.option("--tls-cert", metavar="FILE", default="", help="Speak TLS: its certificate; `quiver tls init` makes it.")
@click.option("--tls-key", metavar="FILE", default="", help="The key of that certificate.")
@click.option("--tls-ca", metavar="FILE", default="", help="The authority of all daemons and clients of the rack.")
@click.option("--token-keys", metavar="PATH", default="", help="Public keys of tokens: a folder of *.pub, or a file.")
@click.option("--quota", metavar="CLASS=WEIGHT", multiple=True, help="A quota class's share, beside 1; repeatable.")
@click.option("--policy", metavar="POLICY", default=Config().policy, show_default=True,
              help="How datasets share the cache: max-min, throughput, las or cost.")  # fmt: skip
@click.option("--origin-rate", metavar="[PREFIX=]RATE", multiple=True,
              help="Bytes per second that the rack may read from an origin, like 200MB; repeatable.")  # fmt: skip
@click.option("--insecure", is_flag=True, help="Serve anyone who can connect, on a network that is trusted.")
@click.option("--drain-seconds", metavar="S", type=float, default=Config().drain_seconds, show_default=True,
              help="How long to hand over and keep serving readers after SIGTERM, SIGINT or SIGHUP.")  # fmt: skip
@click.option("--eviction-notice", metavar="PATH|URL", default="",
              help="Hand over once this file appears, or this URL says so: a spot machine is taken.")  # fmt: skip
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
@click.option("--config", metavar="FILE.toml", type=click.Path(path_type=Path), is_eager=True, callback=_from_toml,
              expose_value=False, help="TOML with the same names as the flags.")  # fmt: skip
@click.version_option(__version__, prog_name="quiver-cacheserver")
def command(**values: Any) -> None:
    """Run one cache daemon of a rack until SIGTERM, SIGINT or SIGHUP, which drain it; nohup blocks SIGHUP."""
    peers = values.pop("peers")
    given = [part.strip() for part in (peers.split(",") if isinstance(peers, str) else peers) if part.strip()]
    kebab = {name.replace("_", "-"): value for name, value in values.items()}
    try:
        lists: dict[str, Any] = {"peers": given, "etcd": ",".join(values["etcd"])}
        lists |= {name: list(values[name]) for name in ("origin", "quota")}
        lists |= {"origin-rate": list(values["origin_rate"]), "tenants": click.get_current_context().obj or {}}
        config = check(msgspec.convert({**kebab, **lists}, Config))
    except (QuiverError, msgspec.ValidationError) as error:
        raise click.UsageError(str(error)) from error
    log_to_stderr(config.log_level)
    return_freed_memory()
    uvloop.run(serve(config))


def main() -> None:
    """Exit 0 after a clean end, 1 with one line after a failure, 2 with one line for wrong usage."""
    try:
        command.main(standalone_mode=False)
    except click.UsageError as error:
        click.echo(f"error: {error.format_message()}", err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except ExceptionGroup as group:
        known, rest = group.split(QuiverError)
        if rest is not None or known is None:
            raise
        click.echo(f"error: {_leaf(known)}", err=True)
        sys.exit(1)
    except (QuiverError, OSError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)


def _leaf(group: BaseExceptionGroup[Any]) -> BaseException:
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
