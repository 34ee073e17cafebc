"""Small reference networks, by the shape of the examples. Users bring their own."""

from collections.abc import Sequence

import torch
from torch import nn

from fedlearn.errors import ConfigError


def logistic(feature_shape: tuple[int, ...], *, num_outputs: int) -> nn.Module:
    """Return multinomial logistic regression on flattened features."""
    return nn.Sequential(nn.Flatten(), nn.Linear(_size(feature_shape), num_outputs))


def mlp(feature_shape: tuple[int, ...], *, hidden: Sequence[int], num_outputs: int) -> nn.Module:
    """Return linear layers with ReLU between them, on flattened features."""
    widths = [_size(feature_shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for width, next_width in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(width, next_width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], num_outputs))


def cnn(feature_shape: tuple[int, ...], *, num_outputs: int) -> nn.Module:
    """Return two convolutions with pooling and two linear layers (LeNet's shape).

    Args:
        feature_shape: [channels, height, width], height and width at least 4.
        num_outputs: Logits.

    Raises:
        ConfigError: The features are not images.
    """
    if len(feature_shape) != 3 or min(feature_shape[1:]) < 4:  # noqa: PLR2004 - channels, height, width
        raise ConfigError(
            f"model.kind: a CNN needs images [channels, height >= 4, width >= 4], the examples "
            f'have shape {list(feature_shape)}; use "mlp"'
        )
    channels, height, width = feature_shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), 128),
        nn.ReLU(),
        nn.Linear(128, num_outputs),
    )


def _size(feature_shape: tuple[int, ...]) -> int:
    return torch.Size(feature_shape).numel()
