"""Client state: tensors that a client keeps between its rounds, such as momentum.

A deployed client stores its state on its own disk. A simulation holds the state of every client
that has trained so far, as part of the run's state.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlearn.algorithms.lanes import size_of
from fedlearn.algorithms.local import MemorySpec
from fedlearn.core.params import Params

#: State by client id, then by name: one vector each.
ClientStates: TypeAlias = Mapping[int, Mapping[str, Tensor]]

_IDS = ".ids"
#: Separates a name from a number. The clients of a custom trainer may keep tensors of different
#: shapes under one name; each shape gets its own tensor in a checkpoint.
_OTHER_SHAPE = "~"


def stack_states(
    states: ClientStates,
    client_ids: Sequence[int],
    *,
    memory: dict[str, Tensor] | None = None,
    without: str = "",
) -> dict[str, Tensor]:
    """Stack the state of K clients by name: rows [K, n], zero for a client without that name.

    Args:
        states: The state of each client that has any.
        client_ids: The K clients.
        memory: The rows of the last call by name, which this call overwrites if they fit: the
            system takes longer to provide new pages than a copy takes. ``None``: allocate.
        without: Name of a state that is left out.
    """
    if not states:
        return {}
    memory = {} if memory is None else memory
    found, each_keeps = dict[str, Tensor](), [states.get(each, {}) for each in client_ids]
    for name, like in {name: value for own in each_keeps for name, value in own.items()}.items():
        if name == without:
            continue
        zero = torch.zeros_like(like)
        rows, last = [own.get(name, zero) for own in each_keeps], memory.get(name)
        fits = last is not None and last.dtype == like.dtype and last.shape[1:] == like.shape
        if last is None or not fits or len(last) < len(rows):
            last = memory[name] = like.new_empty(len(rows), *like.shape)
        found[name] = torch.stack(rows, out=last[: len(rows)])
    return found


def split_states(
    client_ids: Sequence[int], rows: Mapping[str, Tensor], *, mine: NDArray[np.bool_]
) -> dict[int, dict[str, Tensor]]:
    """Split the stacked state of a block into a copy for each of the selected clients.

    Args:
        client_ids: The selected clients, in the order of the block.
        rows: State of all K clients of the block by name: shape [K, n].
        mine: Mask of the selected rows: shape [K].
    """
    # A copy, since the memory of the block is used again; one for each client, since a view would
    # keep the whole block in memory until all its clients have trained again.
    selected = np.flatnonzero(mine).tolist()
    return {
        client_id: {name: values[row].clone() for name, values in rows.items()}
        for client_id, row in zip(client_ids, selected, strict=True)
    }


def replace_states(states: ClientStates, changes: ClientStates) -> ClientStates:
    """Return ``states`` with some clients' state replaced; an empty state removes the client."""
    if not changes:
        return states
    together = {**states, **changes}
    for client_id in [each for each, own in changes.items() if not own]:
        del together[client_id]
    return together


def make_initial_state(spec: MemorySpec, params: Params) -> Tensor:
    """Return the initial state of a client that has not trained yet: zeros."""
    return params.vector.new_zeros(size_of(spec.over, params.layout))


def to_tensors(states: ClientStates) -> dict[str, Tensor]:
    """Convert client state to checkpoint tensors.

    There is one tensor per name and shape, and next to it the client ids of its rows.

    Example:
        >>> found = to_tensors({7: {"velocity": torch.zeros(3)}, 2: {"velocity": torch.ones(3)}})
        >>> {name: value.tolist() for name, value in found.items()}
        {'velocity.ids': [2, 7], 'velocity': [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]}
    """
    by_name = dict[str, dict[tuple[torch.Size, torch.dtype], dict[int, Tensor]]]()
    for client_id in sorted(states):
        for name, value in states[client_id].items():
            shapes = by_name.setdefault(name, {})
            shapes.setdefault((value.shape, value.dtype), {})[client_id] = value
    found = {}
    for name, shapes in by_name.items():
        # The first shape has the plain name, which is how all checkpoints without other shapes
        # look.
        for number, alike in enumerate(shapes.values()):
            key = f"{name}{_OTHER_SHAPE}{number}" if number else name
            found[key + _IDS] = torch.tensor(list(alike))
            found[key] = torch.stack(list(alike.values()))
    return found


def from_tensors(tensors: Mapping[str, Tensor]) -> ClientStates:
    """Restore client state from the tensors of :func:`to_tensors`."""
    states = dict[int, dict[str, Tensor]]()
    for key in [each for each in tensors if not each.endswith(_IDS)]:
        name = key.partition(_OTHER_SHAPE)[0]
        rows = zip(tensors[key + _IDS].tolist(), tensors[key].unbind(0), strict=True)
        for client_id, value in rows:
            states.setdefault(client_id, {})[name] = value
    return states
