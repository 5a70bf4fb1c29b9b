"""Content on local disk, by digest, bounded: ``Store``.

``disk`` is the store and the one recipe by which a file appears; ``inventory`` knows what is there, either in memory (a
daemon, which owns its folder) or by looking (the embedded cache, a folder that many processes share); ``files`` holds
files open and maps them.
"""

from quiver.store.disk import Store, Writing
from quiver.store.files import OpenFile
from quiver.store.inventory import FolderInventory, Inventory, Kind, MemoryInventory

__all__ = ["FolderInventory", "Inventory", "Kind", "MemoryInventory", "OpenFile", "Store", "Writing"]
