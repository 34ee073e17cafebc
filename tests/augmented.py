"""A dataset with random augmentation."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset


@dataclass(frozen=True, eq=False)
class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Adds noise to each example whenever it is read."""

    features: NDArray[np.float32]
    labels: NDArray[Any]

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features = torch.from_numpy(self.features[index])
        return features + torch.randn(len(features)), torch.tensor(self.labels[index])
