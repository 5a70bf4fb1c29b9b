"""Where the user's data lies, read by byte ranges.

``ObjectStore`` is the noun: local files (``local``), S3, GCS, Azure and HTTP (``remote``), and either of them in a
process of its own (``origin_process``), which is how a training process reads a remote store, since it may fork.
``SampleOrigin`` (``samples``) stands above it and knows how the samples of a manifest lie in objects; ``parquet`` is
its variant for files that cannot be read by byte ranges. ``opening`` decides which of them a URL gets.
"""

from quiver.origin.base import Extent, ObjectStore, split_url
from quiver.origin.opening import open_origin, open_store
from quiver.origin.samples import SampleOrigin

__all__ = ["Extent", "ObjectStore", "SampleOrigin", "open_origin", "open_store", "split_url"]
