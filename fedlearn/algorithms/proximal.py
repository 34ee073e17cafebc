"""FedProx's proximal term: local models are pulled towards the global one."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

from annotated_types import doc

from fedlearn.algorithms.local import (
    Affine,
    LocalUpdateWrapper,
    Memory,
    Moment,
    Tensors,
    add_scaled,
    find_affine_step,
)
from fedlearn.core.ranges import NotNegative, Ranged

Pull: TypeAlias = Annotated[
    NotNegative, doc("Strength of the pull towards the global model, >= 0; 0: none.")
]


@dataclass(frozen=True, kw_only=True)
class Proximal(Ranged, LocalUpdateWrapper):
    r"""Adds :math:`\mu (x - x_0)` to each gradient, where :math:`x_0` is the global model.

    :math:`\mu` is ``proximal``.

    References:
        Li et al., 2020, `Federated Optimization in Heterogeneous Networks
        <https://arxiv.org/abs/1812.06127>`_ (FedProx).
    """

    takes_flat: ClassVar[bool] = True

    proximal: Pull

    def affine(self, moment: Moment) -> Affine | None:
        """Return the inner update's affine step with the proximal term, if it has one."""
        inner = find_affine_step(self.inner)
        if inner is None or (rule := inner(moment)) is None:
            return None
        # scale * (g + mu (x - x_0)) = scale * g + (scale mu) x - (scale mu) x_0
        force = rule.scale * self.proximal
        return rule._replace(keep=rule.keep + force, pull=rule.pull - force)

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Take the inner step by the gradients of the loss and the proximal term."""
        pull = add_scaled(x, broadcast["model"], factor=-1.0)
        directions = add_scaled(grads, pull, factor=self.proximal)
        self.inner.step(x, directions, memory, broadcast=broadcast, moment=moment)
