"""The user's data where it lies, read by byte ranges.

- ``base``: the noun ``ObjectStore``, and the URLs that name one.
- ``local``: local and network-mounted files; ``beneath``: files opened so that no link leads out of a folder.
- ``remote``: S3, GCS, Azure through obstore; ``web``: plain HTTP servers; ``web_ranges``: their ranges, received by an
  event loop; ``web_answers``: what they answer to blocking callers; ``proxies``: by which address a server is reached.
- ``runs``: which requests a read becomes; ``gate``: when a store may be retried; ``store_errors``: obstore's errors
  as ours; ``background``: the event loop that remote reads run on.
- ``origin_process``: a remote store in a process of its own, for training processes, since they may fork.
- ``samples``: ``SampleOrigin``, which knows how the samples of a manifest lie in objects; ``parquet``: its variant for
  Parquet files, with ``arrays`` (lists of numbers as bytes), ``parquet_footer`` (how large a file says that its columns
  are) and ``row_group_cache`` (the last row groups decoded).
- ``opening``: which of these reads a URL; ``probing``: whether an origin can be read at all.
"""

from quiver.origin.base import Extent, ObjectStore, split_url
from quiver.origin.opening import open_origin, open_store
from quiver.origin.samples import SampleOrigin

__all__ = ["Extent", "ObjectStore", "SampleOrigin", "open_origin", "open_store", "split_url"]
