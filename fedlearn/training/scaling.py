"""Scaling of features, so that columns in different units are of the same size."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class FeatureScaling:
    """How features were scaled: column by column, ``(value - mean) / std``.

    Attributes:
        means: What is subtracted from each column.
        stds: What each column is divided by, > 0.

    Example:
        >>> import torch
        >>> features = torch.tensor([[50.0, 0.0], [70.0, 1.0]])  # an age, and yes or no
        >>> scaling = FeatureScaling.of(features)
        >>> scaling
        FeatureScaling(means=(60.0, 0.0), stds=(10.0, 1.0))
        >>> scaling.apply(features)
        tensor([[-1.,  0.],
                [ 1.,  1.]])
    """

    means: tuple[float, ...]
    stds: tuple[float, ...]

    @classmethod
    def of(cls, features: Tensor) -> "FeatureScaling":
        """Return the scaling to mean 0 and standard deviation 1 over these rows: [N, F].

        Columns of only 0 and 1 stay as they are, and constant ones become 0.
        """
        wide = features.double()
        is_flag = ((wide == 0) | (wide == 1)).all(dim=0)
        means = torch.where(is_flag, 0.0, wide.mean(dim=0))
        stds = torch.where(is_flag, 1.0, wide.std(dim=0, correction=0))
        # The mean of equal numbers may differ from them in the last bit.
        is_constant = (wide == wide[0]).all(dim=0) & ~is_flag
        means = torch.where(is_constant, wide[0], means)
        stds = torch.where(is_constant, 1.0, stds)
        return cls(means=tuple(means.tolist()), stds=tuple(stds.tolist()))

    def apply(self, features: Tensor) -> Tensor:
        """Scale rows, of shape [N, F], in float64; return the dtype that they have."""
        means, stds = (
            torch.tensor(each, dtype=torch.float64, device=features.device)
            for each in (self.means, self.stds)
        )
        return ((features.double() - means) / stds).to(features.dtype)
