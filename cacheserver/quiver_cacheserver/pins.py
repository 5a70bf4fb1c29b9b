"""Pins: datasets that an operator wants to stay in the cache, whoever needs room.

What a pin protects is what is resident of a dataset; it fetches nothing. Pins are kept by id in a small file of the
data directory, so they survive a restart, and hold for a dataset that the daemon comes to know later. The file contains
names and no digest.

Pins never take all of a daemon: at most ``PINNED_SHARE`` of its capacity is protected, and a pin that would pass this,
or its tenant's quota, is refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from quiver.digest import DIGEST_BYTES, Digest
from quiver.domain import Domain
from quiver.errors import BadRequest, DiskFailed
from quiver.lookup import DigestRows
from quiver.malformed import MALFORMED
from quiver.prepared import prepare
from quiver.sizes import format_size
from quiver.store import MemoryInventory, Store

log = logging.getLogger(__name__)

FILE: Final = "pins.json"
FILE_BYTES_MAX: Final = 1 << 20
PINS_MAX: Final = 1000
PINNED_SHARE: Final = 0.9  # of the capacity; without room for anything else a daemon could not fill for anybody

U8 = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
NO_SHARDS: Final = DigestRows(np.zeros((0, DIGEST_BYTES), np.uint8))


class Pin(msgspec.Struct, frozen=True):
    """A pinned dataset. ``slice_bytes``: what it may take of this daemon; ``tenant``: whose quota counts it.

    ``domain``: the sharing domain of whoever pinned it, as text; the pin holds in no other. ``None``: in any.
    """

    name: str
    slice_bytes: int
    tenant: str = ""
    domain: str | None = None
    pinned_at: float = 0.0  # seconds since 1970

    def is_seen_from(self, domain: Domain | None) -> bool:
        """Whether it is for those who see the names of this domain, or of all (``None``)."""
        return domain is None or self.domain == str(domain)


class Pins:
    """The pinned datasets by id, and their shards. Safe from threads."""

    def __init__(self, store: Store[MemoryInventory]) -> None:
        self._path = store.root / FILE
        self._limit_bytes = int(store.capacity_bytes * PINNED_SHARE)
        self._changing = threading.Lock()  # held while the file is written, which may take long
        self._lock = threading.Lock()  # of what is known of pinned datasets; never held over a write
        self._pins = _read(self._path)
        self._shards: dict[str, U8] = {}  # digests (n, 32), of the pinned datasets that are known
        self._manifests: dict[str, Digest] = {}  # of the same
        self._protected = NO_SHARDS

    def __contains__(self, dataset: str) -> bool:
        return dataset in self._pins

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def limit_bytes(self) -> int:
        return self._limit_bytes

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(self._pins)

    def items(self) -> list[tuple[str, Pin]]:
        return list(self._pins.items())

    def add(self, dataset: str, pin: Pin, quota_bytes: float | None = None) -> None:
        """Pin a dataset, by id. Blocks. Raises ``BadRequest`` if it is too large, ``DiskFailed``.

        A pin that whoever pins it does not see stays as it is: it is another domain's, or that of an operator of all,
        and who replaced it could unpin it. ``quota_bytes``: what the pins of its tenant may take in all.
        """
        with self._changing:
            known = self._pins.get(dataset)
            if known is not None and pin.domain is not None and known.domain != pin.domain:
                return
            others = {name: it for name, it in self._pins.items() if name != dataset}
            if len(others) >= PINS_MAX:
                raise BadRequest(f"{PINS_MAX} datasets are pinned; unpin one first")
            taken = sum(it.slice_bytes for it in others.values())
            _check(pin, taken, self._limit_bytes, "pins may take here")
            if quota_bytes is not None:
                its = sum(it.slice_bytes for it in others.values() if it.tenant == pin.tenant)
                _check(pin, its, int(quota_bytes), f"the quota of tenant {pin.tenant} is here")
            self._save({**others, dataset: pin})

    def remove(self, dataset: str, sees: Domain | None = None) -> bool:
        """Unpin a dataset; return whether it was pinned, as far as the caller sees. Blocks. Raises ``DiskFailed``."""
        with self._changing:
            pin = self._pins.get(dataset)
            if pin is None or not pin.is_seen_from(sees):
                return False
            self._save({name: it for name, it in self._pins.items() if name != dataset})
            with self._lock:
                self._manifests.pop(dataset, None)
                if self._shards.pop(dataset, None) is not None:
                    self._protect()
            return True

    @property
    def manifests(self) -> frozenset[Digest]:
        """The manifests of the pinned datasets, which must not be evicted either."""
        return frozenset(self._manifests.values())

    def know(self, dataset: str, domain: Domain, manifest: Digest, shards: U8) -> None:
        """Learn manifest and shards ``(n, 32)`` of a dataset of this domain, if it is pinned."""
        if dataset in self._pins and dataset not in self._shards:
            with self._lock:
                pin = self._pins.get(dataset)
                if pin is not None and pin.domain in (None, str(domain)):
                    self._shards[dataset], self._manifests[dataset] = shards, manifest
                    self._protect()

    def is_known(self, dataset: str) -> bool:
        return dataset in self._shards

    def among(self, files: U8) -> Mask:
        """Return which of these files ``(n, 32)`` must not be evicted."""
        protected = self._protected
        if not len(protected) or not len(files):
            return np.zeros(len(files), bool)
        mask: Mask = protected.rows_of(files) >= 0
        return mask

    def within_limit(self, files: U8, sizes: npt.NDArray[np.int64]) -> Mask:
        """As ``among``, for all files that are held; no more than the limit, as the capacity may be smaller now."""
        mask = self.among(files)
        if mask.any():
            mask &= np.cumsum(np.where(mask, sizes, 0)) <= self._limit_bytes
        return mask

    def _protect(self) -> None:
        every = list(self._shards.values())
        if not every:
            self._protected = NO_SHARDS
            return
        rows = np.unique(np.concatenate(every), axis=0) if len(every) > 1 else every[0]
        self._protected = DigestRows(rows)

    def _save(self, pins: Mapping[str, Pin]) -> None:
        """Write the file as the store writes its own: under another name, synced, then renamed."""
        temporary = self._path.with_name(f".{FILE}.new")
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(pins), indent=1))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise DiskFailed(f"{self._path}: the pin cannot be kept ({error.strerror}); nothing was changed") from error
        self._pins = dict(pins)


def pin_of(name: str, slice_bytes: int, tenant: str = "", domain: Domain | None = None) -> Pin:
    """Return a pin as of now. ``domain``: of the caller, ``None`` for one that acts in every domain."""
    return Pin(name, slice_bytes, tenant, None if domain is None else str(domain), time.time())


def _check(pin: Pin, taken: int, limit_bytes: int, what: str) -> None:
    if taken + pin.slice_bytes > limit_bytes:
        raise BadRequest(
            f"{pin.name} would take {format_size(pin.slice_bytes)} and other pins take {format_size(taken)}:"
            f" {what} {format_size(limit_bytes)}; unpin another dataset first"
        )


def _read(path: Path) -> dict[str, Pin]:
    """Return the pins of the file. One that is damaged pins nothing, which the log says."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise msgspec.DecodeError(f"more than {FILE_BYTES_MAX} bytes")
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Pin])
    except FileNotFoundError:
        return {}
    except (*MALFORMED, OSError) as error:
        log.warning("%s cannot be read (%s): nothing is pinned; pin the datasets again", path, error)
        return {}


prepare(Pin)
