"""No digest, no token and no key is in a log, a metric, a status or etcd, whatever happens.

Real daemons that require tokens, a real etcd and a client, all at the log level debug, go through reads, fills,
refusals and faults; then everything that they wrote is searched. The search itself is shown to find what is planted.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from quiver.digest import Digest
from quiver.errors import QuiverError
from quiver.peer import PeerClient
from quiver.store import Kind
from quiver.store.inventory import file_of
from quiver.token_source import TokenSource
from quiver.transport.handoff import HandoffRequest, Verb
from quiver_client import DataLoader, Dataset
from tests.client.test_tokens import read_all
from tests.daemon.test_logs import known_digests
from tests.support.daemon import Daemon
from tests.support.data import Files, make_files, random_files
from tests.support.etcd import Etcd, free_ports
from tests.support.tokens import Signer, bearer, replace
from tests.support.waiting import until

DIGITS = 12  # of a digest in hexadecimal: as much of one as nobody would guess, and no text has by accident
CHARACTERS = 20  # of a token or a key in base64


class Secrets:
    """What nobody may write down, in every form in which it could be."""

    def __init__(self, digests: Iterable[Digest], tokens: Iterable[str], keys: Iterable[Ed25519PrivateKey]) -> None:
        self._needles: set[str] = set()
        for digest in digests:
            self._add(bytes(digest))
        for token in tokens:
            # The header is no secret: it names the algorithm and the key.
            _, payload, signature = token.split(".")
            self._needles |= {
                payload[:CHARACTERS],
                payload[-CHARACTERS:],
                signature[:CHARACTERS],
                signature[-CHARACTERS:],
            }
        for key in keys:
            self._add(key.private_bytes_raw())

    def _add(self, secret: bytes) -> None:
        self._needles |= {secret.hex()[:DIGITS], secret.hex()[-DIGITS:], repr(secret)[2:-1]}
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            for before in range(3):  # within something longer, it begins at any of three places of a group
                self._needles.add(encode(bytes(before) + secret).decode()[4 : 4 + CHARACTERS])

    def found_in(self, text: str) -> list[str]:
        """Return the lines that contain a secret; hexadecimal digits in either case."""
        return [
            line
            for line in text.splitlines()
            if any(needle in line or needle in line.lower() for needle in self._needles)
        ]


def everything_in(etcd: Etcd) -> str:
    """Return all keys and values of etcd, also those of the past."""
    told = etcd.ctl("get", "", "--prefix")
    assert "/members/" in told
    return told


@pytest.mark.chaos  # half a minute
@pytest.mark.fault("S10")
def test_no_log_no_metric_and_nothing_in_etcd_has_a_digest_or_a_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = make_files(tmp_path, random_files(60, seed=5, low=3_000, high=9_000), name="small", shard_bytes="32KiB")
    lost = make_files(tmp_path, random_files(12, seed=6, low=3_000, high=9_000), name="lost", shard_bytes="32KiB")
    signer, other = Signer(), Signer()
    signer.publish(tmp_path / "keys")
    operator = signer.token("operator", rights="read,fill,operate")
    tokens = {
        "good": signer.token(),
        "read": signer.token(rights="read"),
        "expired": signer.token(seconds=-1000),
        "unknown key": other.token(),
        "next": other.token("vision"),
        "foreign": signer.token("speech"),
        "operator": operator,
    }
    path = tmp_path / "token"
    replace(path, tokens["good"].encode())
    monkeypatch.setenv("QUIVER_TOKEN_FILE", str(path))
    caplog.set_level(logging.DEBUG)
    manifest = files.opened()
    unknown = Digest.of(b"nobody has it")
    digests = known_digests(manifest) | known_digests(lost.opened()) | {unknown}
    secrets = Secrets(digests, tokens.values(), [signer.key, other.key])
    shown: list[str] = []
    with Etcd() as etcd, contextlib.ExitStack() as stack:
        daemons = []
        for port in free_ports(2):
            where = tmp_path / f"node{port}"
            flags = ("--etcd", etcd.url, "--token-keys", str(tmp_path / "keys"), "--socket", str(tmp_path / f"s{port}"))
            daemon = Daemon(where, *flags, "--log-level", "debug", origins=[files.folder, lost.folder], port=port)
            daemon.token = operator
            daemons.append(stack.enter_context(daemon))
        until(lambda: all(daemon.status()["ring_members"] == 2 for daemon in daemons))
        train(files, daemons[0].url)
        lose(lost, daemons)
        refusals(daemons, tokens, unknown, manifest.shard_digest(0))
        faults(daemons, files, other, tokens["next"], caplog)
        shown += [f"{daemon.ask('GET', route)[1]!r}" for daemon in daemons[1:] for route in ("/metrics", "/v1/status")]
        shown += [f"{daemon.ask('GET', route)[1]!r}" for daemon in daemons[1:] for route in ("/v1/ring", "/readyz")]
        shown.append(everything_in(etcd))
        for daemon in daemons:
            daemon.stop()
    logs = [daemon.log for daemon in daemons]
    for fired in (
        '"reason": "expired"',
        '"reason": "unknown_key"',
        '"reason": "right"',
        "quarantined",
        "was not filled",
    ):
        assert any(fired in log for log in logs), fired
    assert "sending the last token" in caplog.text
    for text in (*logs, *shown, caplog.text):
        assert text
        assert not secrets.found_in(text)
    assert not any(hidden in log for log in logs for hidden in ("[digest]", "[token]")), "none had to be left out"


def train(files: Files, url: str) -> None:
    """An epoch with substitution, which fills the rack; samples of the host's socket and of the rack."""
    with contextlib.closing(Dataset(files.manifest, url, fields=["image", "__key__"])) as dataset:
        loader = DataLoader(dataset, batch_size=8, shuffle=True, substitute=True)
        assert sum(len(batch["__key__"]) for batch in loader) == len(files.content)
        loader.close()
        read_all(dataset, files)
        repr(dataset.stats())


def lose(lost: Files, daemons: list[Daemon]) -> None:
    """Read a dataset whose objects are gone."""
    for file in lost.folder.rglob("*.png"):
        file.unlink()
    with contextlib.closing(Dataset(lost.manifest, daemons[0].url)) as dataset, pytest.raises(QuiverError):
        dataset.__getitems__(list(range(len(dataset))))
    until(lambda: any("was not filled" in daemon.log for daemon in daemons))


def refusals(daemons: list[Daemon], tokens: dict[str, str], unknown: Digest, present: Digest) -> None:
    """Each wrong token on each carrier, and rightful requests for what is not there."""
    for daemon in daemons:
        for token in ("", *tokens.values(), "not.a.token", f"{tokens['good']}x"):
            for digest in (unknown, present):
                daemon.ask("GET", f"/v1/shards/{digest}", None, bearer(token))
                daemon.ask("PUT", f"/v1/shards/{digest}", b"wrong", bearer(token))
                daemon.ask("GET", f"/v1/manifests/{digest}", None, bearer(token))
            daemon.ask("GET", f"/v1/stream?token={token}", None, bearer(token))
            daemon.ask("POST", "/v1/read", b"junk", bearer(token))
            with (
                contextlib.suppress(QuiverError),
                contextlib.closing(PeerClient(daemon.url, token=TokenSource(token))) as peer,
            ):
                peer.status()
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
                raw.connect(str(daemon.data_dir.parent / f"s{daemon.address[1]}"))
                raw.send(HandoffRequest(Verb.HELLO, token=token).encode())
                raw.recv(1000)


def faults(daemons: list[Daemon], files: Files, other: Signer, renewed: str, caplog: pytest.LogCaptureFixture) -> None:
    """Rot on disk, broken files of keys and of a token, a daemon that dies."""
    where, path = files.manifest.parent, Path(os.environ["QUIVER_TOKEN_FILE"])
    manifest = files.opened()
    for daemon in daemons:
        for number in range(manifest.shard_count):
            place = file_of(daemon.data_dir, Kind.SHARD, manifest.shard_digest(number))
            if place.exists():
                place.write_bytes(b"rotten" + place.read_bytes()[6:])
    with contextlib.closing(Dataset(files.manifest, daemons[1].url, fields=["image", "__key__"])) as dataset:
        read_all(dataset, files)  # wrong samples are found, and fetched elsewhere
        until(lambda: any("quarantined" in daemon.log for daemon in daemons))
        other.publish(where / "keys")
        (where / "keys" / "broken.pub").write_text("broken")
        until(lambda: daemons[1].ask("GET", "/v1/ring", None, bearer(renewed))[0] == 200)
        replace(path, b"a broken token file\n")
        until(lambda: dataset[0] and "sending the last token" in caplog.text)
        replace(path, renewed.encode())
        daemons[0].kill()
        read_all(dataset, files)


SIGNER = Signer()
SHARD = Digest.of(b"a shard")


@pytest.mark.parametrize(
    "plant",
    [
        SIGNER.private_pem.decode,
        lambda: str(SHARD),
        lambda: str(SHARD).upper(),
        lambda: f"GET /v1/shards/{str(SHARD)[:16]}…",
        lambda: repr(bytes(SHARD)),
        lambda: base64.b64encode(bytes(SHARD)).decode(),
        lambda: f"Authorization: Bearer {SIGNER.token()}",
        lambda: SIGNER.token().rpartition(".")[2],
        lambda: SIGNER.token().split(".")[1],
        lambda: SIGNER.key.private_bytes_raw().hex(),
    ],
    ids=[
        "a key in PEM",
        "a digest",
        "in upper case",
        "the beginning of one",
        "its bytes",
        "in base64",
        "a header",
        "a signature",
        "claims",
        "a key in hexadecimal",
    ],
)
def test_the_search_finds_what_is_planted(plant: Callable[[], str]) -> None:
    secrets = Secrets([SHARD], [SIGNER.token()], [SIGNER.key])
    innocent = f"2026-11-22 INFO quiver: {SIGNER.key_id} 1700000000123456789 {Digest.of(b'another').hex()}"
    assert not secrets.found_in(innocent)
    assert len(secrets.found_in(f"{innocent}\nDEBUG x: {plant()} y\n{innocent}")) >= 1


def test_what_is_planted_in_a_daemon_is_found(tmp_path: Path) -> None:
    """A URL that a client chose shows up in no log; a node id that an operator chose does, and the search sees it."""
    node_id = str(SHARD)[:32]
    with Daemon(tmp_path / "data", "--node-id", node_id) as daemon:
        daemon.ask("GET", f"/v1/{SHARD}")
        shown = daemon.ask("GET", "/v1/ring")[1].decode()
    secrets = Secrets([SHARD], [], [])
    assert secrets.found_in(shown)
    assert not secrets.found_in(daemon.log), "the daemon's log leaves it out"
