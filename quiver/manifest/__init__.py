"""The manifest: the table that maps samples to shards and to the origin (docs/format.md).

``schema`` says what stands in the file, ``writer`` makes one from arrays, ``checks`` decides whether a file may be
believed, and ``reader`` answers for a file that passed. Between them ``content`` is the file in memory, ``container``
takes it apart, ``checksums`` find what is damaged, and ``columns`` makes ``tables`` of it.
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
