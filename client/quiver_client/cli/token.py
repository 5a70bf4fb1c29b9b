"""``quiver token``: make the key pair that signs tokens, sign tokens, and show what one says.

Signing needs no daemon and no network, only the private key: run it where that key is kept. The libraries are those of
the extra ``access``, and are imported on use: a training image needs none of them.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from quiver.claims import (
    ALGORITHM,
    ANY_RACK,
    DEFAULT_RIGHTS,
    KEY_ID_BYTES,
    LIFETIME_SECONDS_MAX,
    TOKEN_BYTES_MAX,
    Claims,
    Right,
    name_of,
    rights_of,
)
from quiver.errors import BadRequest, Misconfigured
from quiver.extras import what_is_missing
from quiver.token_source import FILE_VARIABLE, VARIABLE, TokenSource
from quiver_client.cli.options import json_option, print_json

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
KEY_FILE_BYTES_MAX: Final = 1 << 16
_DURATION: Final = re.compile(r"(\d{1,9})\s*([smhdw])", re.ASCII)


@click.group("token", epilog="Example: quiver token create --tenant vision --expires 12h --key keys/….key")
def command() -> None:
    """Make keys and sign tokens for readers of a shared rack."""


@command.command("keygen", epilog="Example: quiver token keygen /etc/quiver/token-keys")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@json_option
def keygen(folder: Path, *, as_json: bool) -> None:
    """Make a key pair in DIR: ID.key signs tokens and stays secret; ID.pub goes to the daemons (--token-keys)."""
    private, public, key_id = _new_pair()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    paths = folder / f"{key_id}.key", folder / f"{key_id}.pub"
    _write_new(paths[0], private, 0o600)
    _write_new(paths[1], public, 0o644)
    if as_json:
        print_json({"key_id": key_id, "private": str(paths[0]), "public": str(paths[1])})
    else:
        click.echo(
            f"{paths[0]} signs tokens: keep it secret, and away from the daemons\n{paths[1]} is for --token-keys"
        )


@command.command("create", epilog="Example: quiver token create --tenant vision --expires 12h --key keys/….key > token")
@click.option("--tenant", metavar="NAME", required=True, help="Who will bear it: a team, a project.")
@click.option("--expires", metavar="TIME", required=True, help="How long it is valid, like 30m, 12h or 7d.")
@click.option("--key", metavar="FILE", required=True, type=click.Path(path_type=Path, dir_okay=False),
              help="The private key, from `quiver token keygen`.")  # fmt: skip
@click.option("--domain", metavar="NAME", default="", help="Whom it shares the cache with. [default: its tenant]")
@click.option("--rights", metavar="LIST", default=",".join(sorted(right.value for right in DEFAULT_RIGHTS)),
              show_default=True, help=f"Any of {', '.join(right.value for right in Right)}.")  # fmt: skip
@click.option("--quota", metavar="CLASS", default="", help="The class whose share it gets. [default: that of weight 1]")
@click.option("--rack", metavar="NAME", default=ANY_RACK, help="The only rack that accepts it. [default: any]")
@json_option
def create(key: Path, expires: str, *, as_json: bool, **asked: str) -> None:
    """Sign a token. It is printed to the standard output, and nothing else is."""
    now = int(time.time())
    try:
        tenant = name_of("--tenant", asked["tenant"])
        claims = Claims(
            tenant,
            name_of("--domain", asked["domain"] or tenant),
            rights_of(part.strip() for part in asked["rights"].split(",")),
            now,
            now + _seconds(expires),
            name_of("--quota", asked["quota"]) if asked["quota"] else "",
            name_of("--rack", asked["rack"]),
        )
    except BadRequest as error:
        raise click.UsageError(str(error)) from error
    token, key_id = _signed(claims, key)
    if as_json:
        print_json({"token": token, **_described(claims.payload, key_id)})
    else:
        click.echo(token)


@command.command("show", epilog=f"Example: quiver token show token (without FILE: {VARIABLE} or {FILE_VARIABLE})")
@click.argument("file", metavar="[FILE]", required=False, type=click.File("r"))
@json_option
def show(file: Any, *, as_json: bool) -> None:
    """Print what a token says, without the token. Its signature is not checked: only daemons have to."""
    token = file.read(TOKEN_BYTES_MAX + 2).strip() if file is not None else TokenSource.from_environment().token()
    if not token:
        raise click.UsageError(f"no token: name a file, or set {VARIABLE} or {FILE_VARIABLE}")
    try:
        header, payload = (_part(part) for part in token.split(".")[:2])
        claims = Claims.parse(payload)
        told = _described(claims.payload, str(header.get("kid", "")))
    except (ValueError, BadRequest, RecursionError) as error:
        raise Misconfigured("that is no token of Quiver's; `quiver token create` prints one") from error
    if as_json:
        print_json(told)
        return
    for name, value in told.items():
        click.echo(f"{name:8} {', '.join(value) if isinstance(value, list) else value}")


def _new_pair() -> tuple[bytes, bytes, str]:
    """Return a new private and public key in PEM, and their id."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ModuleNotFoundError as error:
        raise click.ClickException(what_is_missing(error, "quiver token", "access")) from error
    key, pem = Ed25519PrivateKey.generate(), serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    return private, public, _key_id(key)


def _key_id(key: Ed25519PrivateKey) -> str:
    """Return the id of a pair, as daemons make it from the public key."""
    digest = hashlib.sha256(key.public_key().public_bytes_raw()).digest()
    return base64.b32encode(digest[:KEY_ID_BYTES]).decode().lower()


def _signed(claims: Claims, file: Path) -> tuple[str, str]:
    """Return a token, and the id of the key that signed it."""
    try:
        import jwt
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ModuleNotFoundError as error:
        raise click.ClickException(what_is_missing(error, "quiver token", "access")) from error
    try:
        with file.open("rb") as opened:
            key = load_pem_private_key(opened.read(KEY_FILE_BYTES_MAX), password=None)
    except OSError as error:
        raise Misconfigured(f"--key {file}: {error.strerror or error}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise Misconfigured(f"--key {file}: no private key in PEM; `quiver token keygen` makes one") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise Misconfigured(f"--key {file}: no Ed25519 key; `quiver token keygen` makes one")
    if file.stat().st_mode & 0o077:
        click.echo(f"warning: other users may read {file}; chmod 600 it", err=True)
    key_id = _key_id(key)
    return jwt.encode(claims.payload, key, algorithm=ALGORITHM, headers={"kid": key_id}), key_id


def _write_new(path: Path, content: bytes, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)


def _seconds(text: str) -> int:
    match = _DURATION.fullmatch(text.strip())
    seconds = int(match[1]) * SECONDS[match[2]] if match else 0
    if not 0 < seconds <= LIFETIME_SECONDS_MAX:
        raise click.UsageError(f"--expires {text}: write 30m, 12h or 7d; at most {LIFETIME_SECONDS_MAX // 86400}d")
    return seconds


def _part(text: str) -> dict[str, Any]:
    part = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    if not isinstance(part, dict):
        raise ValueError("no object")
    return part


def _described(payload: dict[str, Any], key_id: str) -> dict[str, Any]:
    times = {
        name: datetime.datetime.fromtimestamp(payload[claim], datetime.UTC).isoformat()
        for name, claim in (("issued", "iat"), ("expires", "exp"))
    }
    named = {name: payload[name] for name in ("tenant", "domain", "rights")}
    rack = {} if payload["aud"] == ANY_RACK else {"rack": payload["aud"]}
    return {**named, "quota": payload.get("quota", ""), **rack, **times, "key_id": key_id}
