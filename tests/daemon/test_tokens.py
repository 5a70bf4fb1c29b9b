"""Verifying tokens: which are refused, that a refusal costs the same whatever is wrong, and how keys are replaced."""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed448
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from quiver.claims import TOKEN_BYTES_MAX, Right
from quiver.errors import Misconfigured
from quiver_cacheserver.access import tokens as tokens_module
from quiver_cacheserver.access.keys import PublicKeys
from quiver_cacheserver.access.tokens import LEEWAY_SECONDS, Reason, Refused, Tokens
from tests.support.tokens import Signer, replace

SIGNER, STRANGER = Signer(), Signer()


def part(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def unsigned(algorithm: str) -> str:
    """A token whose header names another algorithm, under the right key id."""
    payload = SIGNER.token().split(".")[1]
    return f"{part({'alg': algorithm, 'kid': SIGNER.key_id})}.{payload}.{part('x')}"


def by_public_key() -> str:
    """A token "signed" by HMAC with the public key as the secret, as daemons that trust the header would accept."""
    payload = json.loads(base64.urlsafe_b64decode(SIGNER.token().split(".")[1] + "=="))
    return jwt.encode(payload, "a" * 32, algorithm="HS256", headers={"kid": SIGNER.key_id})


def tampered() -> str:
    header, _, signature = SIGNER.token().split(".")
    return ".".join([header, SIGNER.token("root").split(".")[1], signature])


BAD: dict[str, tuple[Reason, Callable[[], str]]] = {
    "none": (Reason.MISSING, lambda: ""),
    "too large": (Reason.TOO_LARGE, lambda: "a" * (TOKEN_BYTES_MAX + 1)),
    "no token": (Reason.MALFORMED, lambda: "abc"),
    "no JSON": (Reason.MALFORMED, lambda: "a.b.c"),
    "deeply nested": (
        Reason.MALFORMED,
        lambda: base64.urlsafe_b64encode(b"[" * 1200).decode() + ".e30.e30",
    ),
    "not ASCII": (Reason.MALFORMED, lambda: "é.é.é"),
    "not UTF-8": (Reason.MALFORMED, lambda: b"a.b.\xff".decode(errors="surrogateescape")),  # as headers are decoded
    "algorithm none": (Reason.MALFORMED, lambda: unsigned("none")),
    "algorithm HS256": (Reason.MALFORMED, by_public_key),
    "algorithm RS256": (Reason.MALFORMED, lambda: unsigned("RS256")),
    "no algorithm": (Reason.MALFORMED, lambda: f"{part({'kid': SIGNER.key_id})}.e30.e30"),
    "a detached payload": (Reason.MALFORMED, lambda: SIGNER.token(headers={"b64": False, "crit": ["b64"]})),
    "no key id": (Reason.UNKNOWN_KEY, lambda: SIGNER.token(headers={"kid": ""})),
    "another's key": (Reason.UNKNOWN_KEY, STRANGER.token),
    "another's signature": (Reason.BAD_SIGNATURE, lambda: STRANGER.token(headers={"kid": SIGNER.key_id})),
    "tampered": (Reason.BAD_SIGNATURE, tampered),
    "no signature": (Reason.BAD_SIGNATURE, lambda: SIGNER.token().rpartition(".")[0] + "."),
    "expired": (Reason.EXPIRED, lambda: SIGNER.token(seconds=-LEEWAY_SECONDS - 1)),
    "of the future": (Reason.NOT_YET_VALID, lambda: SIGNER.token(iat=int(time.time()) + LEEWAY_SECONDS + 60)),
    "not before": (Reason.NOT_YET_VALID, lambda: SIGNER.token(nbf=int(time.time()) + LEEWAY_SECONDS + 60)),
    "no expiry": (Reason.MALFORMED, lambda: SIGNER.token(exp=None)),
    "no time of issue": (Reason.MALFORMED, lambda: SIGNER.token(iat=None)),
    "no issuer": (Reason.MALFORMED, lambda: SIGNER.token(iss=None)),
    "no audience": (Reason.MALFORMED, lambda: SIGNER.token(aud=None)),
    "another issuer": (Reason.AUDIENCE, lambda: SIGNER.token(iss="somebody")),
    "another rack": (Reason.AUDIENCE, lambda: SIGNER.token(aud="r8")),
    "endless": (Reason.MALFORMED, lambda: SIGNER.token(exp=float("inf"))),
    "no tenant": (Reason.MALFORMED, lambda: SIGNER.token(tenant="")),
    "an unknown right": (Reason.MALFORMED, lambda: SIGNER.token(rights="read,root")),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    SIGNER.publish(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def tokens(folder: Path) -> Tokens:
    return Tokens(PublicKeys(folder), "r7")


def reason_of(tokens: Tokens, token: str) -> Reason:
    with pytest.raises(Refused) as caught:
        tokens.verify(token)
    assert token not in str(caught.value) or not token
    return caught.value.reason


@pytest.mark.fault("S8")
@pytest.mark.parametrize(("reason", "make"), BAD.values(), ids=BAD)
def test_a_bad_token_is_refused_for_its_reason(tokens: Tokens, reason: Reason, make: Callable[[], str]) -> None:
    assert reason_of(tokens, make()) is reason
    assert reason_of(tokens, make()) is reason  # also when it comes again


@pytest.mark.fault("S8")
@pytest.mark.parametrize(("reason", "make"), BAD.values(), ids=BAD)
def test_each_refusal_costs_one_verification_of_a_signature(
    tokens: Tokens, reason: Reason, make: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the time would tell a missing token from a forged one, and a known key from an unknown one."""
    verified: list[str] = []

    class Counted:
        def __init__(self, key: Any, name: str) -> None:
            self._key, self._name = key, name

        def verify(self, *arguments: Any) -> None:
            verified.append(self._name)
            self._key.verify(*arguments)

    prepared = jwt.algorithms.OKPAlgorithm.prepare_key
    monkeypatch.setattr(tokens, "_decoy", Counted(tokens._decoy, "decoy"))
    monkeypatch.setattr(
        jwt.algorithms.OKPAlgorithm, "verify", lambda self, data, key, signature: count(key, signature, data)
    )

    def count(key: Any, signature: bytes, data: bytes) -> bool:
        verified.append("key")
        try:
            prepared(jwt.algorithms.OKPAlgorithm(), key).verify(signature, data)
        except tokens_module.InvalidSignature:
            return False
        return True

    token = make()
    assert reason_of(tokens, token) is reason
    assert len(verified) == 1


def test_a_good_token_says_who_its_bearer_is_for_this_rack_or_any(tokens: Tokens) -> None:
    for audience in ("quiver", "r7"):
        claims, key_id = tokens.verify(SIGNER.token("vision", rights="read", aud=audience, quota="batch"))
        assert (claims.tenant, claims.domain, claims.quota) == ("vision", "vision", "batch")
        assert claims.rights == {Right.READ}
        assert key_id == SIGNER.key_id


def test_a_token_that_was_verified_is_remembered_and_expires_all_the_same(folder: Path) -> None:
    now = [time.time()]
    tokens = Tokens(PublicKeys(folder), "r7", lambda: now[0])
    token = SIGNER.token(seconds=100)
    assert tokens.verify(token) is tokens.verify(token)
    claims, key_id = tokens.verify(token)
    now[0] += 99 + LEEWAY_SECONDS
    assert tokens.fault(key_id, claims.expires_at) is None
    now[0] += 2
    assert tokens.fault(key_id, claims.expires_at) is Reason.EXPIRED


def test_what_is_remembered_is_bounded_and_contains_no_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "REMEMBERED_MAX", 8)
    tokens = Tokens(PublicKeys(folder), "r7")
    made = [SIGNER.token(f"tenant{number}") for number in range(20)]
    for token in made:
        tokens.verify(token)
    assert len(tokens._remembered) == 8
    assert not any(part in repr(tokens._remembered.items()) for token in made for part in token.split("."))


# -- keys --------------------------------------------------------------------------------------------------------------


def test_keys_roll_over_without_a_gap(folder: Path, tokens: Tokens) -> None:
    new, old_token = Signer(), SIGNER.token()
    assert reason_of(tokens, new.token()) is Reason.UNKNOWN_KEY
    new.publish(folder)
    tokens.refresh()
    tokens.verify(new.token())
    claims, key_id = tokens.verify(old_token)
    (folder / f"{SIGNER.key_id}.pub").unlink()
    tokens.refresh()
    tokens.verify(new.token())
    assert reason_of(tokens, old_token) is Reason.UNKNOWN_KEY  # though it was remembered
    assert tokens.fault(key_id, claims.expires_at) is Reason.UNKNOWN_KEY  # and on streams that were opened with it


def test_a_broken_file_keeps_its_keys_and_is_logged_once(
    folder: Path, tokens: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / f"{SIGNER.key_id}.pub"
    replace(path, b"-----BEGIN PUBLIC KEY-----\nhalf of it")
    tokens.refresh()
    tokens.refresh()
    tokens.verify(SIGNER.token())
    assert caplog.text.count("stay valid until it is mended") == 1
    replace(path, SIGNER.public_pem)
    caplog.clear()
    tokens.refresh()
    tokens.verify(SIGNER.token())
    assert not caplog.text


def test_a_broken_file_does_not_keep_a_key_that_another_file_withdrew(folder: Path, tokens: Tokens) -> None:
    other = Signer()
    path = other.publish(folder)
    tokens.refresh()
    replace(path, b"broken")
    (folder / f"{SIGNER.key_id}.pub").unlink()
    tokens.refresh()
    tokens.verify(other.token())
    assert reason_of(tokens, SIGNER.token()) is Reason.UNKNOWN_KEY


def test_a_folder_that_becomes_empty_or_vanishes_keeps_its_keys(
    folder: Path, tokens: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / f"{SIGNER.key_id}.pub").unlink()
    tokens.refresh()
    folder.rmdir()
    tokens.refresh()
    tokens.verify(SIGNER.token())
    assert "no key is left" in caplog.text


def test_a_file_may_hold_several_keys(tmp_path: Path) -> None:
    (tmp_path / "keys.pem").write_bytes(SIGNER.public_pem + b"\n" + STRANGER.public_pem)
    tokens = Tokens(PublicKeys(tmp_path / "keys.pem"), "r7")
    tokens.verify(SIGNER.token())
    tokens.verify(STRANGER.token())


def pem(key: Any) -> bytes:
    encoded: bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return encoded


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no Ed25519 public key"),
        (b"x" * 70000, "no Ed25519 public key"),
        (SIGNER.private_pem, "no Ed25519 public key"),
        (pem(ed448.Ed448PrivateKey.generate()), "no Ed25519 public key"),
        (pem(ec.generate_private_key(ec.SECP256R1())), "no Ed25519 public key"),
        (SIGNER.public_pem.replace(b"MC", b"!!"), "no Ed25519 public key"),
    ],
    ids=["empty", "too large", "a private key", "Ed448", "P-256", "garbled"],
)
def test_a_daemon_does_not_start_with_a_file_that_holds_anything_else(
    tmp_path: Path, content: bytes, said: str
) -> None:
    (tmp_path / "a.pub").write_bytes(content)
    with pytest.raises(Misconfigured, match=said) as caught:
        PublicKeys(tmp_path)
    assert "a.pub" in str(caught.value)


def test_a_folder_without_keys_is_misconfigured(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="quiver token keygen"):
        PublicKeys(tmp_path)
    with pytest.raises(Misconfigured, match="No such file"):
        PublicKeys(tmp_path / "nothing")


def test_private_keys_beside_the_public_ones_are_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "a.key").write_bytes(SIGNER.private_pem)
    with caplog.at_level(logging.WARNING):
        PublicKeys(folder)
    assert "no daemon needs" in caplog.text
