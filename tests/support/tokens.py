"""Keys that sign tokens, and tokens: as ``quiver token`` makes them, and wrong ones."""

from __future__ import annotations

import base64
import hashlib
import time
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat


class Signer:
    """A key pair."""

    def __init__(self) -> None:
        self.key = Ed25519PrivateKey.generate()
        digest = hashlib.sha256(self.key.public_key().public_bytes_raw()).digest()
        self.key_id = base64.b32encode(digest[:10]).decode().lower()

    @property
    def public_pem(self) -> bytes:
        return self.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    @property
    def private_pem(self) -> bytes:
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    def publish(self, folder: Path) -> Path:
        """Write the public key to a folder, as an operator does; return the file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.key_id}.pub"
        replace(path, self.public_pem)
        return path

    def token(
        self,
        tenant: str = "vision",
        *,
        rights: str = "read,fill",
        seconds: float = 3600,
        headers: dict[str, Any] | None = None,
        **claims: Any,
    ) -> str:
        """Sign a token that expires in so many seconds. ``claims`` are added, or replace others; ``None`` omits one."""
        now = int(time.time())
        payload = {
            "iss": "quiver",
            "aud": "quiver",
            "iat": now,
            "exp": int(now + seconds),
            "tenant": tenant,
            "domain": tenant,
            "rights": rights.split(","),
            **claims,
        }
        payload = {name: value for name, value in payload.items() if value is not None}
        return jwt.encode(payload, self.key, algorithm="EdDSA", headers={"kid": self.key_id, **(headers or {})})


def replace(path: Path, content: bytes) -> None:
    """Replace a file by a rename, as whoever renews keys and tokens should."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(content)
    temporary.replace(path)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}
