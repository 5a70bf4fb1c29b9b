"""All contenders by name. A module is imported when its contender runs, since its packages may be missing."""

from __future__ import annotations

import importlib
from typing import Final

from bench.peers.base import Peer

PEERS: Final = {
    "quiver": "quiver:QuiverHost",
    "quiver-bytes": "quiver:QuiverHostBytes",
    "quiver-socket": "quiver:QuiverSocket",
    "quiver-rack": "quiver:QuiverRack",
    "quiver-rack-bytes": "quiver:QuiverRackBytes",
    "quiver-cold": "origin:QuiverCold",
    "quiver-decoded": "quiver:QuiverDecoded",
    "files": "files:Files",
    "files-decoded": "files:DecodedFiles",
    "origin": "origin:Origin",
    "mapped": "mapped:MappedSlices",
    "mapped-verified": "mapped:MappedVerified",
    "gather": "mapped:MappedGather",
    "webdataset": "webdataset:WebDataset",
    "litdata": "litdata:LitData",
    "litdata-indexed": "litdata:LitDataIndexed",
    "mds": "mds:Mds",
    "mds-indexed": "mds:MdsIndexed",
    "sockets": "sockets:Sockets",
    "memcached": "memcached:Memcached",
    "redis": "redis:Redis",
    "nginx": "nginx:Nginx",
}


def peer(name: str) -> type[Peer]:
    """Return the class of a contender."""
    module, _, attribute = PEERS[name].partition(":")
    found: type[Peer] = getattr(importlib.import_module(f"bench.peers.{module}"), attribute)
    return found
