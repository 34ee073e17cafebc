"""FedProx's proximal term: local models are pulled towards the global one."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

from annotated_types import doc

from fedlearn.algorithms.local import Around, Memory, Moment, Tensors, sums
from fedlearn.core.ranges import NotNegative, Ranged

Pull: TypeAlias = Annotated[
    NotNegative, doc("Strength of the pull towards the global model, >= 0; with 0 there is none.")
]


@dataclass(frozen=True, kw_only=True)
class Proximal(Ranged, Around):
    r"""Adds :math:`\mu (x - x_0)` to each gradient, where :math:`x_0` is the global model.

    :math:`\mu` is ``proximal``.

    References:
        Li et al., 2020, `Federated Optimization in Heterogeneous Networks
        <https://arxiv.org/abs/1812.06127>`_ (FedProx).
    """

    takes_flat: ClassVar[bool] = True

    proximal: Pull

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, told: Memory, moment: Moment
    ) -> None:
        """Take the inner step by the gradients of the loss and the proximal term."""
        pull = sums(x, told["model"], factor=-1.0)
        directions = sums(grads, pull, factor=self.proximal)
        self.inner.step(x, directions, memory, told=told, moment=moment)
