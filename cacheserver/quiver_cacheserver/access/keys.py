"""The public keys that sign tokens: one or more at once, so that keys can be replaced without a gap.

A key's id is made from the key, so an id never names another key. Files are read again when they change. A file that
cannot be read keeps the keys that it had: a mistake must not lock everybody out. A file that is removed loses its keys,
which is how a key is withdrawn, unless no key would be left.
"""

from __future__ import annotations

import base64
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

from quiver.claims import KEY_ID_BYTES
from quiver.errors import Misconfigured

log = logging.getLogger(__name__)

SUFFIX: Final = ".pub"
FILE_BYTES_MAX: Final = 1 << 16
KEYS_MAX: Final = 64
_END: Final = b"-----END PUBLIC KEY-----"

_Stat = tuple[int, int, int]


class PublicKeys:
    """The keys of a folder's ``*.pub`` files, or of one file; by key id. ``refresh`` is for one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Raises ``Misconfigured`` if there is no key, or a file contains anything else."""
        self._path = path
        self._files: dict[Path, tuple[_Stat, dict[str, Ed25519PublicKey]]] = {}
        self._broken: dict[Path, _Stat] = {}  # files that were logged, so that each is logged once
        for file, stat in self._found().items():
            self._files[file] = stat, _keys_of(file)
        self.by_id: Mapping[str, Ed25519PublicKey] = self._joined()
        if not self.by_id:
            raise Misconfigured(f"--token-keys {path}: it has no *{SUFFIX} file; `quiver token keygen` makes one")
        if path.is_dir() and any(path.glob("*.key")):
            log.warning("--token-keys %s: it contains private keys, which no daemon needs; remove them here", path)

    def __repr__(self) -> str:
        return f"PublicKeys({len(self.by_id)} keys)"

    def refresh(self) -> bool:
        """Read again what changed; return whether the keys are other ones now. Blocks on the disk."""
        try:
            found = self._found()
        except Misconfigured as error:
            self._keep(self._path, (0, 0, 0), error)
            return False
        files: dict[Path, tuple[_Stat, dict[str, Ed25519PublicKey]]] = {}
        for file, stat in found.items():
            before = self._files.get(file)
            if before is not None and before[0] == stat:
                files[file] = before
                continue
            try:
                files[file] = stat, _keys_of(file)
                self._broken.pop(file, None)
            except Misconfigured as error:
                self._keep(file, stat, error)
                if before is not None:
                    files[file] = before
        if not any(keys for _, keys in files.values()):
            self._keep(self._path, (0, 0, 0), Misconfigured(f"--token-keys {self._path}: no key is left"))
            return False
        self._files, before_by_id = files, self.by_id
        self._broken.pop(self._path, None)
        self.by_id = self._joined()
        if self.by_id.keys() == before_by_id.keys():
            return False
        log.info("--token-keys: %d keys now: %s", len(self.by_id), ", ".join(self.by_id))
        return True

    def _keep(self, file: Path, stat: _Stat, error: Misconfigured) -> None:
        if self._broken.get(file) != stat:
            self._broken[file] = stat
            log.warning("%s; the keys that it had stay valid until it is mended", error)

    def _found(self) -> dict[Path, _Stat]:
        """Return the files and how they are now. Raises ``Misconfigured``."""
        try:
            files = sorted(self._path.glob(f"*{SUFFIX}")) if self._path.is_dir() else [self._path]
            if len(files) > KEYS_MAX:
                raise Misconfigured(f"--token-keys {self._path}: {len(files)} files; {KEYS_MAX} are the most")
            stats = {file: file.stat() for file in files}
        except OSError as error:
            raise Misconfigured(f"--token-keys {self._path}: {error.strerror or error}") from error
        return {file: (it.st_mtime_ns, it.st_size, it.st_ino) for file, it in stats.items()}

    def _joined(self) -> dict[str, Ed25519PublicKey]:
        return {key_id: key for _, keys in self._files.values() for key_id, key in keys.items()}


def key_id_of(key: Ed25519PublicKey) -> str:
    """Return the id of a key: 80 bits of its SHA-256, in letters and digits."""
    digest = hashlib.sha256(key.public_bytes(Encoding.Raw, PublicFormat.Raw)).digest()
    return base64.b32encode(digest[:KEY_ID_BYTES]).decode().lower()


def _keys_of(file: Path) -> dict[str, Ed25519PublicKey]:
    """Return the keys of a PEM file by their ids. Raises ``Misconfigured``."""
    try:
        with file.open("rb") as opened:
            content = opened.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise Misconfigured(f"--token-keys {file}: {error.strerror or error}") from error
    keys = {}
    for part in content.split(_END)[:-1] if len(content) <= FILE_BYTES_MAX else ():
        try:
            key = load_pem_public_key(part.lstrip() + _END + b"\n")
        except (ValueError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, Ed25519PublicKey):
            raise Misconfigured(f"--token-keys {file}: a key that is no Ed25519 public key in PEM")
        keys[key_id_of(key)] = key
    if not keys:
        raise Misconfigured(f"--token-keys {file}: no Ed25519 public key in PEM")
    return keys
