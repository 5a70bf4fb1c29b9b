"""Content on local disk, by digest, bounded: ``Store``.

``disk`` is the store and the one recipe by which a file appears; ``inventory`` knows what is there, either in memory (a
daemon, which owns its folder) or by looking (the embedded cache, a folder that many processes share).
"""

from quiver.store.disk import OpenFile, Store, Writing
from quiver.store.inventory import FolderInventory, Inventory, Kind, MemoryInventory

__all__ = ["FolderInventory", "Inventory", "Kind", "MemoryInventory", "OpenFile", "Store", "Writing"]
