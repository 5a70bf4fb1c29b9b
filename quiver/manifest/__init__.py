"""The manifest: the table that maps samples to shards and to the origin (docs/format.md).

``schema`` defines what a file contains, ``writer`` makes a file from arrays, and ``reader`` is an open manifest. On the
way from file to reader, ``content`` holds the bytes in memory, ``container`` parses the Arrow file (its metadata by
``flatbuffer``), ``checksums`` detects damage, ``columns`` turns the buffers into ``tables``, and ``checks`` validates
them.
"""

from quiver.manifest.reader import Manifest
from quiver.manifest.schema import ABSENT, BLOB_TYPE, FORMAT_VERSION, KEY_FIELD, SUFFIX, Field, Header, OriginObject
from quiver.manifest.writer import ManifestParts, write_manifest

__all__ = [
    "ABSENT",
    "BLOB_TYPE",
    "FORMAT_VERSION",
    "KEY_FIELD",
    "SUFFIX",
    "Field",
    "Header",
    "Manifest",
    "ManifestParts",
    "OriginObject",
    "write_manifest",
]
