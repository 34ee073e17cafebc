"""Dropout whose masks are a function of (seed, round, client, step), not of a generator.

A stacked training of many clients, a training of one client after another and a resumed
run then drop the same units. A mask element is a hash of the step's key, the layer and the
element's index, computed in tensor operations, so it also works under ``vmap``.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedlearn.core.randomness import Seed

_CHANNELWISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_MASK_32 = 0xFFFFFFFF


@dataclass
class _Key:
    """The key of the current step: an int64 scalar, a batched one under ``vmap``."""

    value: Tensor


class KeyedDropout(nn.Module):
    """Drop-in for ``nn.Dropout`` and its channel-wise forms.

    Args:
        rate: Probability of a zero.
        channelwise: Drop whole channels (dimension 1) instead of elements.
        layer: Index of this layer, so that layers differ.
        key: The step's key, shared by all layers of a model.
    """

    def __init__(self, *, rate: float, channelwise: bool, layer: int, key: _Key) -> None:
        super().__init__()
        self.rate, self.channelwise, self.layer, self.key = rate, channelwise, layer, key

    def forward(self, inputs: Tensor) -> Tensor:
        """Return ``inputs`` with units dropped and the rest scaled by 1 / (1 - rate)."""
        if not self.training or self.rate == 0.0:
            return inputs
        if self.rate >= 1.0:
            return torch.zeros_like(inputs)
        shape = inputs.shape
        if self.channelwise:
            shape = inputs.shape[:2] + (1,) * (inputs.dim() - 2)
        index = torch.arange(torch.Size(shape).numel(), device=inputs.device).view(shape)
        bits = _scramble(_scramble(index + self.layer * 0x632BE5AB) ^ self.key.value)
        keep = bits >= int(self.rate * (_MASK_32 + 1))
        return inputs * keep.to(inputs.dtype) / (1.0 - self.rate)


def _scramble(bits: Tensor) -> Tensor:
    """Return a 32-bit hash of each element, in int64.

    References:
        C. Wellons, 2018, "Prospecting for Hash Functions" (lowbias32).
    """
    bits = bits & _MASK_32
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & _MASK_32
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & _MASK_32
    return bits ^ (bits >> 16)


def global_generator(device: torch.device) -> torch.Generator:
    """Return the generator that a forward pass on ``device`` draws from if it draws at all."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


@contextmanager
def untouched(generator: torch.Generator) -> Iterator[None]:
    """Give the generator back as it was: the application's own draws are not ours to move."""
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)


class KeyedDropouts:
    """The dropout layers of one model and the key they share."""

    def __init__(self, key: _Key, num_layers: int) -> None:
        self._key, self._num_layers = key, num_layers

    @classmethod
    def install(cls, module: nn.Module) -> "KeyedDropouts":
        """Replace every dropout layer inside ``module`` by a keyed one."""
        key, num_layers = _Key(torch.zeros((), dtype=torch.int64)), 0
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, (nn.Dropout, *_CHANNELWISE)):
                    keyed = KeyedDropout(
                        rate=child.p,
                        channelwise=isinstance(child, _CHANNELWISE),
                        layer=num_layers,
                        key=key,
                    ).train(child.training)
                    setattr(parent, name, keyed)
                    num_layers += 1
        return cls(key, num_layers)

    def __len__(self) -> int:
        return self._num_layers

    def set_key(self, key: int) -> None:
        """Take the key of one client's step."""
        if self._num_layers:
            self._key.value = torch.tensor(key)

    def set_keys(self, keys: Tensor) -> None:
        """Take a key tensor as it is: batched, inside ``vmap``."""
        self._key.value = keys


def step_keys(seeds: Sequence[Seed], num_steps: int) -> NDArray[np.int64]:
    """Return the 32-bit keys of the steps of some clients: shape [len(seeds), num_steps].

    Args:
        seeds: One for each client and round.
        num_steps: Steps of each.
    """
    hashes = Seed.hash_each(seeds, np.arange(num_steps)) & np.uint64(_MASK_32)
    return hashes.astype(np.int64)
