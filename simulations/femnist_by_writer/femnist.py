"""The network for FEMNIST."""

import torch
from torch import Tensor, nn

_NUM_CLASSES = 62


class Network(nn.Module):
    """One hidden layer on gray images, dark on white; with BatchNorm after it if asked."""

    def __init__(self, *, width: int, has_batch_norm: bool) -> None:
        super().__init__()
        norm = [nn.BatchNorm1d(width)] if has_batch_norm else []
        self.body = nn.Sequential(nn.Linear(28 * 28, width), *norm, nn.ReLU())
        self.head = nn.Linear(width, _NUM_CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the scores of uint8 images, shape [B, height, width]."""
        ink = 1.0 - pixels.flatten(1).to(torch.float32) / 255.0
        scores: Tensor = self.head(self.body(ink))
        return scores


def make_model(*, width: int = 200, has_batch_norm: bool = False) -> nn.Module:
    """Build the network: 169,462 parameters without BatchNorm."""
    return Network(width=width, has_batch_norm=has_batch_norm)
