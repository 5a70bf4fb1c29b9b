"""Which ranks get the same samples: from the names of a device mesh's dimensions, or from a process group.

Pure but for the attributes of torch's objects that are read: nothing is communicated, and no process group is made.
The group of a rank, and the rank and number of its share, follow from the arguments alone, the same way in every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch import distributed

# The names in use: PyTorch's own examples, torchtitan, Accelerate, Lightning, and Megatron's terms.
DATA_DIMS: Final = (
    *("dp", "ddp", "fsdp", "hsdp", "data", "batch", "replicate", "shard"),
    *("dp_replicate", "dp_shard", "data_parallel", "data_replicate", "data_shard"),
)
SHARED_DIMS: Final = (
    *("tp", "cp", "sp", "pp", "mp", "model", "tensor", "context", "sequence", "pipe", "pipeline"),
    *("tensor_parallel", "context_parallel", "sequence_parallel", "pipeline_parallel", "model_parallel"),
)
Ranks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """The ranks that read one share, and which share: ``rank`` of ``world_size``. The first of ``members`` leads."""

    rank: int
    world_size: int
    members: tuple[int, ...]  # ranks of torch.distributed
    own: int  # of this process

    @property
    def leader(self) -> int:
        return self.members[0]

    @property
    def is_leader(self) -> bool:
        return self.own == self.leader

    @property
    def followers(self) -> tuple[int, ...]:
        return self.members[1:]


def group_of(mesh: Any, replicate: Any, rank: int | None, world_size: int | None) -> ReplicaGroup | None:
    """Return the group of this process as the loader's arguments say; ``None`` if they name none.

    Raises ``ValueError`` naming the argument that is wrong.
    """
    if mesh is None and replicate is None:
        return None
    if mesh is not None and replicate is not None:
        raise ValueError("replicate: mesh says already which ranks get the same samples; give one of the two")
    if mesh is not None:
        if rank is not None or world_size is not None:
            raise ValueError("mesh: rank and world_size follow from it; leave them out")
        return _of_mesh(mesh)
    return _of_process_group(replicate, rank, world_size)


# -- a device mesh ----------------------------------------------------------------------------------------------------


def _of_mesh(given: Any) -> ReplicaGroup:
    mesh, named = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if not all(hasattr(mesh, name) for name in ("mesh", "mesh_dim_names", "get_coordinate")):
        raise ValueError(f"mesh: give a torch.distributed.device_mesh.DeviceMesh, not {type(mesh).__name__}")
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError("mesh: its dimensions have no names; make it with mesh_dim_names, such as ('dp', 'tp')")
    own, root = distributed.get_rank(), _root_of(mesh)
    data = _data_dims(tuple(names), named)
    return group_in_mesh(
        _tensor(mesh),
        data,
        own,
        root=_tensor(root),
        root_names=tuple(root.mesh_dim_names or ()),
        is_part=root is not mesh and named is None,
    )


def _data_dims(names: tuple[str, ...], named: Any) -> tuple[int, ...]:
    """Return the positions of the data-parallel dimensions: as ``named``, or else by their usual names."""
    if named is not None:
        chosen = (named,) if isinstance(named, str) else tuple(named) if isinstance(named, Iterable) else (named,)
        for name in chosen:
            if name not in names:
                raise ValueError(f"mesh: it has no dimension {name!r}; its dimensions are {_listed(names)}")
        return tuple(names.index(name) for name in names if name in chosen)
    unknown = [name for name in names if name not in DATA_DIMS + SHARED_DIMS]
    data = tuple(place for place, name in enumerate(names) if name in DATA_DIMS)
    if unknown or not data:
        why = f"whether {unknown[0]!r} is data-parallel is not known" if unknown else "none of them is data-parallel"
        raise ValueError(
            f"mesh: its dimensions are {_listed(names)}, and {why}. Name those that get different samples:"
            " mesh=(device_mesh, ('dp',)), or mesh=(device_mesh, ()) if all its ranks get the same"
        )
    return data


def group_in_mesh(
    mesh: Ranks, data: Sequence[int], own: int, *, root: Ranks, root_names: Sequence[str] = (), is_part: bool = False
) -> ReplicaGroup:
    """Return the group of rank ``own``. ``data``: which dimensions of ``mesh`` are data-parallel.

    ``mesh`` may be a part of ``root``, in which parallel parts hold the ranks that get the same samples. ``is_part``:
    the user passed a part and named no dimensions, so those of ``root`` that the part leaves out are looked at as well.
    """
    at = np.argwhere(mesh == own)
    if len(at) != 1:
        raise ValueError(f"mesh: this process, rank {own}, is not in it; give a mesh that it is in, or no mesh")
    through = mesh[tuple(slice(None) if dim in data else int(at[0][dim]) for dim in range(mesh.ndim))].ravel()
    places = np.argwhere(np.isin(root, through))  # (data-parallel ranks, dimensions of root)
    spans = [bool(len(places)) and bool((column != column[0]).any()) for column in places.T]
    if len(places) != len(through) or np.prod([n for n, spanned in zip(root.shape, spans, strict=True) if spanned]) != (
        len(through)
    ):
        raise ValueError("mesh: its data-parallel ranks are no full dimensions of the mesh that it was taken from")
    for dim, (size, spanned) in enumerate(zip(root.shape, spans, strict=True)):
        name = root_names[dim] if dim < len(root_names) else ""
        if is_part and size > 1 and not spanned and name not in SHARED_DIMS:
            raise ValueError(
                f"mesh: it is part of a mesh of {_listed(root_names)}, and whether {name!r} gets other samples is not"
                " known. Pass the whole mesh, and name the dimensions that do: mesh=(device_mesh, ('dp',))"
            )
    own_place = np.argwhere(root == own)[0]
    members = root[tuple(int(own_place[dim]) if spanned else slice(None) for dim, spanned in enumerate(spans))].ravel()
    rank = int(np.flatnonzero(through == own)[0])
    return ReplicaGroup(rank, len(through), tuple(members.tolist()), own)


def _root_of(mesh: Any) -> Any:
    """Return the mesh that this one was taken from, or itself. torch has no public name for it."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed import device_mesh

    resources: Any = getattr(device_mesh, "_mesh_resources", None)
    return resources.get_root_mesh(mesh) if hasattr(resources, "get_root_mesh") else mesh


def _tensor(mesh: Any) -> Ranks:
    return np.asarray(mesh.mesh.cpu().numpy(), np.int64)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


# -- a process group --------------------------------------------------------------------------------------------------


def _of_process_group(group: Any, rank: int | None, world_size: int | None) -> ReplicaGroup:
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError("replicate: call torch.distributed.init_process_group before the loader is made")
    if group is distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("replicate: this process is not in the group; give the group that it is in, or none")
    if not isinstance(group, distributed.ProcessGroup):
        raise ValueError(f"replicate: give a torch.distributed.ProcessGroup, not {type(group).__name__}")
    members, own = tuple(sorted(distributed.get_process_group_ranks(group))), distributed.get_rank()
    if (rank is None) != (world_size is None):
        raise ValueError(f"{'rank' if rank is None else 'world_size'}: give rank and world_size both, or neither")
    if rank is None or world_size is None:
        found = share_of_group(members, distributed.get_world_size())
        if found is None:
            raise ValueError(
                f"replicate: which share the group of ranks {_listed_ranks(members)} reads is not known, since groups"
                f" of its form do not divide {distributed.get_world_size()} ranks. Give rank and world_size as well:"
                " the number of this group, and how many groups there are; or give mesh"
            )
        rank, world_size = found
    return ReplicaGroup(rank, world_size, members, own)


def share_of_group(members: Sequence[int], world_size: int) -> tuple[int, int] | None:
    """Return the number of a group among all groups of its form, and how many there are.

    Groups of one form are translates of one another, as those of a mesh are. They are numbered by their first rank.
    ``None`` if translates of these ``members`` do not divide the ``world_size`` ranks.
    """
    first = min(members)
    offsets = np.asarray(sorted(members), np.int64) - first
    if world_size % len(offsets):
        return None
    taken = np.zeros(world_size, bool)
    firsts: list[int] = []
    for rank in range(world_size):  # the lowest rank that no group has is the first one of its group
        if taken[rank]:
            continue
        if rank + offsets[-1] >= world_size or taken[rank + offsets].any():
            return None
        taken[rank + offsets] = True
        firsts.append(rank)
    return (firsts.index(first), len(firsts)) if first in firsts else None


def _listed_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
