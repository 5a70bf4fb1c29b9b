"""Content on local disk, by digest, bounded: ``Store``.

``disk`` is the store, and the one recipe by which it writes a file. ``inventory`` knows what the folder holds: in
memory (a daemon, which owns its folder), with sizes and times in the columns of a ``table``, or by scanning (the
embedded cache, a folder that many processes share). ``files`` holds files open and maps them, ``room`` decides what to
evict where no daemon does, ``domains`` records which sharing domains hold a file, ``locks`` decides who may use a
folder, and ``folders`` makes what somebody deleted again.
"""

from quiver.store.disk import Evict, Store, Writing
from quiver.store.files import OpenFile
from quiver.store.inventory import FolderInventory, Inventory, Kind, MemoryInventory
from quiver.store.room import idle_of, put_with_room, reserve_with_room

__all__ = [
    "Evict",
    "FolderInventory",
    "Inventory",
    "Kind",
    "MemoryInventory",
    "OpenFile",
    "Store",
    "Writing",
    "idle_of",
    "put_with_room",
    "reserve_with_room",
]
