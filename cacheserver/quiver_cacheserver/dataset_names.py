"""What people call the datasets that this daemon knows: names for operators, in place of digests.

A dataset is called what its manifest says (``quiver index --name``), else what the clients that read it say, which is
the name of the file that they opened, else ``unnamed``. Several manifests may have one name; those after the first, in
the order of their digests, get `` (2)``, `` (3)`` and so on, so that daemons which know the same datasets call them the
same, and each name stands for one dataset. Names are given within a sharing domain: what other domains read changes no
name in this one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from quiver.digest import Digest
from quiver.domain import SINGLE, Domain
from quiver.identity import told_apart

UNNAMED: Final = "unnamed"
DATASETS_MAX: Final = 4096  # of all domains; the one heard of longest ago is forgotten first
TOLD_MAX: Final = 8  # names that clients told for one manifest: copies of its file may have different names


@dataclass(slots=True)
class _Known:
    """The names of one manifest: its own, and those that clients told, the latest last."""

    own: str = ""
    told: OrderedDict[str, None] = field(default_factory=OrderedDict)

    @property
    def name(self) -> str:
        """The first in the order of the alphabet, of those told: the order in which daemons hear of them differs."""
        return self.own or min(self.told, default=UNNAMED)


class DatasetNames:
    """The shown names of manifests, by sharing domain. Belongs to the event loop."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[Domain, Digest], _Known] = OrderedDict()
        self._shown: dict[Domain, dict[Digest, str]] = {}  # computed since the domain's names last changed

    def __len__(self) -> int:
        return len(self._known)

    def heard(self, manifest: Digest, domain: Domain = SINGLE, *, own: str = "", told: str = "") -> None:
        """Hear of a manifest: the name in it, and the one that a client told; "" for none.

        Both were checked (``quiver.identity.check_name``) where they were parsed.
        """
        key = domain, manifest
        known = self._known.get(key)
        before = known.name if known is not None else None
        if known is None:
            known = self._known[key] = _Known()
            while len(self._known) > DATASETS_MAX:
                (forgotten, _), _ = self._known.popitem(last=False)
                self._shown.pop(forgotten, None)
        self._known.move_to_end(key)
        if own:
            known.own = own
        if told:
            known.told[told] = None
            known.told.move_to_end(told)
            while len(known.told) > TOLD_MAX:
                known.told.popitem(last=False)
        if known.name != before:
            self._shown.pop(domain, None)

    def shown(self, manifest: Digest, domain: Domain = SINGLE) -> str:
        """Return what a manifest is called; no other manifest of the domain that is known here is called the same."""
        return self._names(domain).get(manifest, UNNAMED)

    def find(self, name: str, domain: Domain = SINGLE) -> Digest | None:
        """Return the manifest that is called this; ``None`` if none is."""
        return next((manifest for manifest, each in self._names(domain).items() if each == name), None)

    def _names(self, domain: Domain) -> dict[Digest, str]:
        names = self._shown.get(domain)
        if names is None:
            names = self._shown[domain] = told_apart(
                {manifest: known.name for (of, manifest), known in self._known.items() if of == domain}
            )
        return names
