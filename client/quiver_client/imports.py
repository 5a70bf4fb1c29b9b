"""What the threads of a session would import one day, imported before there are any.

A process that is forked while one of its threads imports a module inherits that module locked: the child waits for ever
when it comes to import it, which for a loader's worker is its first batch. Ours are imported where they are named, at
the top. What is left are modules that libraries import when they are first called.
"""

from __future__ import annotations

import numpy as np
import numpy.ma
import pyarrow as pa
import pyarrow.compute

from quiver.manifest import Manifest
from quiver.origin.opening import import_ahead as import_origin


def import_ahead(manifest: Manifest) -> None:
    """Import what reading this dataset will need. Takes a while the first time, and nothing after that."""
    import_origin(manifest)
    pa.array(np.zeros(1, np.int64))  # looks whether there is pandas, and imports it
