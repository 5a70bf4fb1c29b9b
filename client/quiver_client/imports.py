"""Imports what the threads of a session would import later, before there are any threads.

A process that forks while one of its threads imports a module inherits that module's lock, held: the child deadlocks
when it imports the module, which a loader's worker does at its first batch. Our own modules are imported at the top
of the modules that use them; this module imports what libraries import when they are first called.
"""

from __future__ import annotations

import numpy as np
import numpy.ma
import pyarrow as pa
import pyarrow.compute

from quiver.manifest import Manifest
from quiver.origin.opening import import_ahead as import_origin


def import_ahead(manifest: Manifest) -> None:
    """Import what reading this dataset needs. Takes a while the first time, and no time afterwards."""
    import_origin(manifest)
    pa.array(np.zeros(1, np.int64))  # tries to import pandas
