"""Small reference networks, sized by the shape of the examples. Most runs bring their own model.

Each is a frozen dataclass that builds a new network when it is called.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import torch
from annotated_types import doc
from torch import nn

from fedlearn.core.ranges import Count
from fedlearn.errors import ConfigError

_SMALLEST = 4  # two poolings halve an image twice
_IMAGE_DIMS = 3  # channels, height, width


@dataclass(frozen=True, kw_only=True)
class Logistic:
    """Multinomial logistic regression on flattened features.

    Attributes:
        feature_shape: Shape of one example's features.
        num_outputs: Number of logits.
    """

    feature_shape: tuple[int, ...]
    num_outputs: int

    def __call__(self) -> nn.Module:
        """Build a new network."""
        width = torch.Size(self.feature_shape).numel()
        return nn.Sequential(nn.Flatten(), nn.Linear(width, self.num_outputs))


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """Linear layers with ReLU between them, on flattened features.

    Example:
        >>> network = Mlp(feature_shape=(1, 28, 28), hidden=(64,), num_outputs=10)()
        >>> sum(parameter.numel() for parameter in network.parameters())
        50890
    """

    feature_shape: Annotated[tuple[int, ...], doc("Shape of one example's features.")]
    hidden: Annotated[tuple[Count, ...], doc("Units of each hidden layer, >= 1.")]
    num_outputs: Annotated[int, doc("Logits.")]

    def __call__(self) -> nn.Module:
        """Build a new network."""
        widths = [torch.Size(self.feature_shape).numel(), *self.hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for width, next_width in pairwise(widths):
            layers += [nn.Linear(width, next_width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], self.num_outputs))


@dataclass(frozen=True, kw_only=True)
class Cnn:
    """Two convolutions with pooling and two linear layers (LeNet's shape).

    Attributes:
        feature_shape: [channels, height, width], height and width at least 4.
        num_outputs: Number of logits.

    Raises:
        ConfigError: The features do not have such a shape.
    """

    feature_shape: tuple[int, ...]
    num_outputs: int

    def __post_init__(self) -> None:
        if len(self.feature_shape) != _IMAGE_DIMS or min(self.feature_shape[1:]) < _SMALLEST:
            raise ConfigError(
                f'model.kind: "cnn" needs images [channels, height >= {_SMALLEST}, '
                f"width >= {_SMALLEST}], but an example's features have shape "
                f'{list(self.feature_shape)}; use "mlp"'
            )

    def __call__(self) -> nn.Module:
        """Build a new network."""
        channels, height, width = self.feature_shape
        return nn.Sequential(
            nn.Conv2d(channels, 16, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * (height // _SMALLEST) * (width // _SMALLEST), 128),
            nn.ReLU(),
            nn.Linear(128, self.num_outputs),
        )
