"""L2 norms of tensors that are spread over several processes."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm


def get_mesh(tensor: Tensor) -> Any:  # Any: torch's mesh, whose import takes seconds
    """Return the mesh over which a tensor is spread; ``None``: this process has all of it."""
    return getattr(tensor, "device_mesh", None)


def get_own_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, without a copy."""
    if get_mesh(tensor) is None:
        return tensor
    spread: Any = tensor  # Any: a DTensor, whose import takes seconds
    part: Tensor = spread.to_local()
    return part


def group_by_mesh(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors by their mesh, since a single torch operation cannot mix meshes."""
    groups: dict[object, list[Tensor]] = defaultdict(list)
    for each in tensors:
        groups[get_mesh(each)].append(each)
    return list(groups.values())


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements, each counted once: float64, a scalar.

    Every process that has a part of one of the tensors must call this, with its parts.
    """
    groups: dict[Any, list[Tensor]] = defaultdict(list)  # Any: a mesh and placements, or None
    for each in tensors:
        mesh = get_mesh(each)
        groups[None if mesh is None else (mesh, getattr(each, "placements", ()))].append(each)
    total = torch.zeros((), dtype=torch.float64)
    for place, members in groups.items():
        squares = get_total_norm([get_own_part(each) for each in members]).double().square()
        if place is not None:
            mesh, placements = place
            for dim, placement in enumerate(placements):
                if not placement.is_replicate():  # replicas are equal, and count only once
                    dist.all_reduce(squares, group=mesh.get_group(dim))
        total = total.to(squares.device) + squares
    return total
