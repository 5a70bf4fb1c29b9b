"""Indexing: a manifest out of data that stays where and as it is.

``run`` is the sequence of steps. ``listing`` (with ``local``, ``remote``, ``web``) says what objects there are,
``detect`` what they are; ``files``, ``webdataset`` (with ``tar``) and ``parquet`` turn them into samples through
``reading`` and ``parallel``, ``npy`` sees which files are arrays, ``columns`` holds what was found, and ``assemble``
makes it a manifest.
"""

from quiver_client.indexing.parallel import Progress
from quiver_client.indexing.report import Notice, Report
from quiver_client.indexing.run import index

__all__ = ["Notice", "Progress", "Report", "index"]
