"""What a training script imports: ``Dataset``, ``Mix``, ``DataLoader``, ``BatchSampler``, ``merge_states``,
``index`` and ``warm``.

    from quiver_client import DataLoader, Dataset
    loader = DataLoader(Dataset("imagenet.quiver"), batch_size=256, shuffle=True)

Loaded on first use, so that the ``quiver`` command does not wait for torch. The modules:

- ``dataset`` is the description that users hold, ``session`` what one process has open for it: tiers (``tier`` is the
  noun), which are ``embedded`` (a local folder), ``rack`` (its daemons) and ``origin_tier``
- ``readable`` is what datasets, ``concatenated`` and ``joined`` ones have in common: parts by ``selection`` and
  ``splitting``, and the ``placement`` of samples in manifests; ``resolution`` reads torch's Subset and ConcatDataset,
  ``iterable`` is a stream; ``opened`` is what parts share, ``summary`` what ``repr`` says
- ``batch`` holds and verifies a batch's samples; ``fields`` makes samples or columns of it, for ``dataset`` and
  ``collated_dataset``; ``loaded`` is a batch whose samples are yet to be made, ``seeding`` seeds them
- ``buffers``, ``pages`` and ``native`` copy bytes; ``shard_maps`` are mapped shards
- ``mix`` draws several datasets in given proportions
- ``integrations``: what other libraries' trainers need beside the loader
- ``loader`` decides orders and prefetches; ``needs_reporter`` reports what is still needed, ``identity`` for whom
- ``read_clock`` tells reading from making samples
- ``manifest_download`` opens manifests by URL, ``config`` parses ``cache=``, ``origin_patience`` retries an origin that
  does not answer, ``stats`` counts, ``failure`` describes a sample's error
- ``process_exit`` starts threads and ends them before the interpreter exits; ``thread_pool`` is a pool of such threads,
  ``imports`` imports what they need; ``orphans`` ends workers whose parent was killed; ``memory`` tunes malloc
- ``operating`` adds up what a rack's daemons tell operators
- ``migration`` moves a job to another rack: ``warm`` brings what it still needs there
- ``planning`` predicts, by simulation, what racks would give a list of jobs
- ``indexing`` makes manifests, ``certificates`` those of TLS; ``cli`` is the ``quiver`` command
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from quiver.extras import what_is_missing

if TYPE_CHECKING:
    from quiver_client.concatenated import Concatenated
    from quiver_client.dataset import Dataset
    from quiver_client.indexing import index
    from quiver_client.joined import Joined
    from quiver_client.loader.dataloader import DataLoader
    from quiver_client.loader.mix.guided import Guided
    from quiver_client.loader.profile import Profile
    from quiver_client.loader.sampler import BatchSampler
    from quiver_client.loader.state import merge_states
    from quiver_client.migration.warming import warm
    from quiver_client.mix import Mix

__all__ = [
    "BatchSampler",
    "Concatenated",
    "DataLoader",
    "Dataset",
    "Guided",
    "Joined",
    "Mix",
    "Profile",
    "index",
    "merge_states",
    "warm",
]

_HOME: Final = {
    "BatchSampler": "quiver_client.loader.sampler",
    "Concatenated": "quiver_client.concatenated",
    "DataLoader": "quiver_client.loader.dataloader",
    "Dataset": "quiver_client.dataset",
    "Guided": "quiver_client.loader.mix.guided",
    "Joined": "quiver_client.joined",
    "Mix": "quiver_client.mix",
    "Profile": "quiver_client.loader.profile",
    "index": "quiver_client.indexing",
    "merge_states": "quiver_client.loader.state",
    "warm": "quiver_client.migration.warming",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        raise ImportError(what_is_missing(error, f"quiver_client.{name}", "client")) from error
