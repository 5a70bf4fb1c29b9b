"""``quiver tls init``: an authority and certificates for a rack, without openssl."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from quiver.errors import Misconfigured
from quiver.extras import what_is_missing
from quiver_client.cli.options import json_option, print_json

if TYPE_CHECKING:
    from quiver_client.certificates import Authority, Pair

CA: Final = "ca"
CERTIFICATE_DAYS: Final = 365
CA_DAYS: Final = 3650
KEY_MODE: Final = 0o600
CERTIFICATE_MODE: Final = 0o644

EXAMPLE = """\b
Example: two nodes, and a client's certificate for alice's jobs:
  quiver tls init tls --node n1=host1,10.0.0.1 --node n2=host2,10.0.0.2 --client alice
Run it again in the same folder to add certificates. ca.key signs them: keep it off the nodes.
"""


@click.group("tls")
def command() -> None:
    """Make the certificates that daemons and clients speak TLS with."""


@command.command("init", epilog=EXAMPLE)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option("--node", "nodes", metavar="ID=HOST,…", multiple=True,
              help="A daemon: its node id, and the names and addresses in its URL. Repeatable.")  # fmt: skip
@click.option("--client", "clients", metavar="NAME", multiple=True, help="A client. Repeatable.")
@click.option("--days", type=click.FloatRange(0, min_open=True), default=CERTIFICATE_DAYS, show_default=True,
              help="How long the certificates are valid.")  # fmt: skip
@json_option
def init(folder: Path, *, nodes: Sequence[str], clients: Sequence[str], days: float, as_json: bool) -> None:
    """Make an authority in DIR, unless there is one, and certificates that it signs.

    Writes ca.pem and ca.key, and for each node and client node-ID.pem, node-ID.key, client-NAME.pem, client-NAME.key.
    Keys are readable by their owner alone. No file is ever overwritten.
    """
    hosts = dict(_parsed(node) for node in nodes)
    names = [*(f"node-{node}" for node in hosts), *(f"client-{client}" for client in clients)]
    if len(names) != len(set(names)) or len(hosts) != len(nodes):
        raise click.UsageError("a node or a client is named twice")
    if taken := next((name for name in names if _exists(folder, name)), None):
        raise Misconfigured(
            f"{folder / taken}.pem is there already, and nothing is overwritten: to renew it, move it and its key away"
        )
    authority, is_new = _authority(folder)
    issued = {
        **{f"node-{node}": authority.node(node, its, days) for node, its in hosts.items()},
        **{f"client-{client}": authority.client(client, days) for client in clients},
    }
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    for name, pair in (({CA: authority.pair} if is_new else {}) | issued).items():
        _write(folder, name, pair)
    if as_json:
        print_json(_report(folder, is_new, names))
    else:
        click.echo("\n".join(_lines(folder, is_new, list(hosts), list(clients))))


def _parsed(node: str) -> tuple[str, list[str]]:
    name, equals, hosts = node.partition("=")
    if not equals:
        raise click.UsageError(f"--node {node}: write ID=HOST,…, for example n1=host1,10.0.0.1")
    return name, [host.strip() for host in hosts.split(",") if host.strip()]


def _exists(folder: Path, name: str) -> bool:
    return any((folder / f"{name}{suffix}").exists() for suffix in (".pem", ".key"))


def _authority(folder: Path) -> tuple[Authority, bool]:
    """Return the folder's authority, and whether it is a new one, which is not written yet."""
    try:
        from quiver_client.certificates import Authority, Pair
    except ModuleNotFoundError as error:
        raise Misconfigured(what_is_missing(error, "quiver tls init", "access")) from error
    if not _exists(folder, CA):
        return Authority.new("quiver", CA_DAYS), True
    try:
        pair = Pair((folder / f"{CA}.pem").read_bytes(), (folder / f"{CA}.key").read_bytes())
        return Authority(pair), False
    except OSError as error:
        raise Misconfigured(f"{error.filename}: {error.strerror}; both files of the authority are needed") from error
    except Misconfigured as error:
        raise Misconfigured(f"{folder / CA}.pem: {error}") from error


def _write(folder: Path, name: str, pair: Pair) -> None:
    """Write a pair, the key first; leave neither if one cannot be written."""
    with contextlib.ExitStack() as undo:
        for suffix, data, mode in ((".key", pair.key, KEY_MODE), (".pem", pair.certificate, CERTIFICATE_MODE)):
            path = folder / f"{name}{suffix}"
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            undo.callback(path.unlink)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
        undo.pop_all()


def _report(folder: Path, is_new: bool, names: list[str]) -> dict[str, Any]:
    written = [{"name": name, "cert": f"{folder / name}.pem", "key": f"{folder / name}.key"} for name in names]
    return {"ca": f"{folder / CA}.pem", "new_ca": is_new, "certificates": written}


def _lines(folder: Path, is_new: bool, nodes: list[str], clients: list[str]) -> list[str]:
    ca, start = f"{folder / CA}.pem", f"{folder}/node-"
    lines = [f"{ca}: {'a new authority' if is_new else 'the authority that was there'}"]
    for node in nodes:
        lines += [
            f"node {node}: copy {ca} and node-{node}.* to it, and start it with",
            f"  quiver-cacheserver --tls-ca {ca} --tls-cert {start}{node}.pem --tls-key {start}{node}.key …",
        ]
    for client in clients:
        lines += [
            f"client {client}: name the daemons https://HOST:7717, and set",
            f"  export QUIVER_TLS_CA={ca} QUIVER_TLS_CERT={folder}/client-{client}.pem"
            f" QUIVER_TLS_KEY={folder}/client-{client}.key",
        ]
    return [*lines, f"{folder / CA}.key signs certificates: keep it off the nodes."] if is_new else lines
