"""Dropout whose masks are a function of (seed, round, client, step), not of a generator.

Stacked training of many clients, training of one client after another and a resumed run
therefore drop the same units. A mask element is a hash of the step's key, the layer and the
element's index. It is computed with tensor operations, so it also works under ``vmap``.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedlearn.core.randomness import Seed, lock_global_generators

_Dropout: TypeAlias = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d
_MASK_32 = 0xFFFFFFFF


class KeyedDropout(nn.Module):
    """Drop-in replacement for ``nn.Dropout`` and its channel-wise forms.

    Args:
        layer: The layer to replace.
        number: Number of this layer in the model, so that layers draw different masks.
        shared: State that all dropout layers of the model share, such as the step's key.

    Attributes:
        p: Share of the units that is dropped.
        kind: Class name of the replaced layer.
    """

    def __init__(self, layer: _Dropout, *, number: int, shared: "KeyedDropouts") -> None:
        super().__init__()
        self.p, self.kind = layer.p, type(layer).__name__
        self.channelwise = not isinstance(layer, nn.Dropout)
        self.layer, self.shared = number, shared
        self.train(layer.training)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return ``inputs`` with units dropped and the rest scaled by 1 / (1 - p)."""
        if not self.training or self.p == 0.0:
            return inputs
        if self.p >= 1.0:
            return torch.zeros_like(inputs)
        shape = inputs.shape
        if self.channelwise:
            shape = inputs.shape[:2] + (1,) * (inputs.dim() - 2)
        index = torch.arange(torch.Size(shape).numel(), device=inputs.device).view(shape)
        index = index + self.shared.offset(shape)
        # A large odd multiplier keeps the layers' indices apart.
        bits = _scramble(_scramble(index + self.layer * 0x632BE5AB) ^ self.shared.key)
        # The hash is uniform over 0..2**32 - 1, so it is below p * 2**32 with probability p.
        keep = bits >= int(self.p * (_MASK_32 + 1))
        return inputs * keep.to(inputs.dtype) / (1.0 - self.p)


def describe_layer(name: str, module: nn.Module) -> str:
    """Format a layer's name for a message, with the class that the user wrote."""
    kind = module.kind if isinstance(module, KeyedDropout) else type(module).__name__
    return f"layer {name} ({kind})" if name else f"the model ({kind})"


def _scramble(bits: Tensor) -> Tensor:
    """Return a 32-bit hash of each element, in int64.

    References:
        C. Wellons, 2018, "Prospecting for Hash Functions" (lowbias32).
    """
    # The products may wrap around in int64, which leaves their low 32 bits correct.
    bits = bits & _MASK_32
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & _MASK_32
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & _MASK_32
    return bits ^ (bits >> 16)


def global_generator(device: torch.device) -> torch.Generator:
    """Return torch's default generator for ``device``, from which forward passes draw."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


@contextmanager
def preserve_generator(generator: torch.Generator) -> Iterator[None]:
    """Restore the generator's state after the block, so that the application's draws do not change.

    Other threads wait for the block to end: see
    :func:`~fedlearn.core.randomness.lock_global_generators`.
    """
    with lock_global_generators():
        state = generator.get_state()
        try:
            yield
        finally:
            generator.set_state(state)


class KeyedDropouts:
    """The dropout layers of one model and the key that they share.

    Args:
        module: The model, whose dropout layers are replaced by keyed ones in place.

    Attributes:
        key: 32-bit key of the current step: an int64 scalar, batched under ``vmap``.
    """

    def __init__(self, module: nn.Module) -> None:
        self.key, self._num_layers = torch.zeros((), dtype=torch.int64), 0
        self._first, self._num_rows = 0, 1
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, _Dropout):
                    setattr(parent, name, KeyedDropout(child, number=len(self), shared=self))
                    self._num_layers += 1

    def __len__(self) -> int:
        return self._num_layers

    def set_key(self, key: int, *, first: int = 0, num_rows: int = 1) -> None:
        """Set the key of one client's step.

        Args:
            key: 32 bits.
            first: Position in the step's batch of the first example of the next forward pass.
            num_rows: Number of examples in the next forward pass.
        """
        if self._num_layers:
            self.key = torch.tensor(key)
        self._first, self._num_rows = first, num_rows

    def set_example_key(self, key: Tensor) -> None:
        """Set the key of one example that goes through the model alone."""
        self.key, self._first = key, 0

    def offset(self, shape: Sequence[int]) -> int:
        """Return the index of a mask's first element in the mask of the step's whole batch.

        Examples run along the first dimension, with one or more rows each. If the size of that
        dimension rules this out, as when weights are dropped for all examples at once, it is 0.

        Args:
            shape: Shape of the mask for the examples of this forward pass.
        """
        if not self._first or shape[0] % self._num_rows:
            return 0
        # So many mask elements belong to the examples before: the masks of all shares together are
        # that of the whole batch.
        return self._first * (torch.Size(shape).numel() // self._num_rows)


def example_keys(keys: Tensor | int, places: Tensor) -> Tensor:
    """Derive a key for each example that goes through the model alone: int64.

    Args:
        keys: Keys of the steps: int64, any shape.
        places: Positions of the examples in their batches: int64, broadcastable with ``keys``.
    """
    # From 1, because the hash of 0 is 0 and would not change the first example's key.
    return _scramble(keys ^ _scramble(places + 1))


def share_key(key: int, first: int) -> int:
    """Derive the generator seed of the share of a batch that starts at example ``first``.

    The first share uses the key itself, as training in one process does. Other shares draw
    different numbers.
    """
    return key if first == 0 else int(example_keys(key, torch.tensor(first)))


def step_seed(seed: Seed, *, round_num: int, client_id: int) -> Seed:
    """Derive the seed of one client's :func:`step_keys` in a round."""
    return seed.derive("masks", round_num, client_id)


def step_keys(seeds: Sequence[Seed], num_steps: int) -> NDArray[np.int64]:
    """Derive the 32-bit key of each step of some clients: shape [len(seeds), num_steps].

    Args:
        seeds: One for each client and round.
        num_steps: Steps of each client.
    """
    hashes = Seed.hash_each(seeds, np.arange(num_steps)) & np.uint64(_MASK_32)
    return hashes.astype(np.int64)
