"""The norm bound: the coordinator clips every update before it averages them."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import doc

from fedlearn.algorithms.aggregations import LaneSums, WeightedMean
from fedlearn.algorithms.lanes import Updates
from fedlearn.algorithms.transforms import ClippedUpdates
from fedlearn.core.ranges import Positive, Ranged


@dataclass(frozen=True, kw_only=True)
class NormBound(Ranged, WeightedMean):
    r"""The mean of the updates, each scaled down to an L2 norm of at most ``clip_norm``.

    It is a sum, so it takes the memory of one update. Unlike
    :class:`~fedlearn.algorithms.transforms.ClippedUpdates` on clients, it also holds for clients
    that do not clip. Running statistics are neither counted nor scaled.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fedlearn.algorithms.lanes import DELTA
        >>> from fedlearn.core.params import Layout
        >>> rule = NormBound(by_examples=False, clip_norm=5.0)
        >>> state = rule.init([DELTA], Layout.of(nn.Linear(1, 1)), device=torch.device("cpu"))
        >>> rows = {"delta": torch.tensor([[3.0, 4.0], [300.0, 400.0]])}
        >>> state = rule.accumulate(state, Updates([0, 1], torch.ones(2), rows, [0, 0]))
        >>> rule.finalize(state).lanes["delta"]
        tensor([3., 4.])

    References:
        Sun et al., 2019, `Can You Really Backdoor Federated Learning?
        <https://arxiv.org/abs/1911.07963>`_, section 4.
    """

    clip_norm: Annotated[Positive, doc("Largest L2 norm of an update in the mean, > 0.")]

    def accumulate(self, state: LaneSums, updates: Updates) -> LaneSums:
        """Add the weighted rows of ``updates``, clipped."""
        return super().accumulate(state, ClippedUpdates(update_clip_norm=self.clip_norm)(updates))
