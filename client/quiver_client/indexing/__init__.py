"""Indexing: making a manifest of data that stays where it is and as it is.

``run`` is the sequence of steps. ``listing`` (with ``local``, ``remote``, ``web``) lists the objects of a source into
``objects``, ``detect`` determines their format, ``selection`` which fields are wanted, and ``target`` checks what may
be overwritten. ``files``, ``webdataset`` (with ``tar``) and ``parquet`` (with ``parquet_schema``) turn objects into
samples, which ``reading`` reads and ``parallel`` spreads over threads; ``npy`` recognises arrays and ``keys`` names
samples inside of archives. ``columns`` collects the samples, ``assemble`` makes them a manifest, ``report`` says what
was found and skipped, and ``errors`` are those of a source that changes while it is read.
"""

from quiver_client.indexing.parallel import Progress
from quiver_client.indexing.report import Notice, Report
from quiver_client.indexing.run import index

__all__ = ["Notice", "Progress", "Report", "index"]
