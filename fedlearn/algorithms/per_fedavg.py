r"""Per-FedAvg: the global model is a good start for one step of training on a client's data.

========================== ==========================================
symbol                     here
========================== ==========================================
:math:`w`                  a client's parameters
:math:`\alpha`             ``adaptation_rate``
:math:`\beta`              the inner update's learning rate
:math:`\delta`             ``hessian_step``
========================== ==========================================

A local step is the inner update's, with the meta-gradient in place of the gradient:

.. math::

    v = \nabla f(w - \alpha \nabla f(w)), \qquad
    w \leftarrow w - \beta \Big(v - \alpha
    \frac{\nabla f(w + \delta v) - \nabla f(w - \delta v)}{2 \delta}\Big).

The difference approximates a product with the Hessian (Per-FedAvg HF). Without ``hessian_step`` it
is left out (Per-FedAvg FO). All gradients of a step are those of its batch, where the paper draws
independent batches.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

from annotated_types import doc

from fedlearn.algorithms.local import (
    LocalUpdateWrapper,
    Memory,
    Moment,
    Tensors,
    add_scaled,
    require_update,
)
from fedlearn.algorithms.recipes import Algorithm, ByExamples, FedAvg, Local
from fedlearn.core.calls import explain_calls
from fedlearn.core.ranges import NotNegative, Positive, Ranged

AdaptationRate: TypeAlias = Annotated[
    NotNegative, doc("Step size of a client's adaptation, >= 0; 0: none, as in FedAvg.")
]
HessianStep: TypeAlias = Annotated[
    Positive | None,
    doc(
        "Step of the differences that replace products with the Hessian, > 0, such as 1e-3; not "
        "set: the first-order method, without them."
    ),
]


@dataclass(frozen=True, kw_only=True)
class MetaGradient(Ranged, LocalUpdateWrapper):
    """Steps by the gradient of the loss after one step of adaptation.

    Attributes:
        inner: Any local update.
        adaptation_rate: See :func:`PerFedAvg`, as for ``hessian_step``.
    """

    asks_gradients: ClassVar[bool] = True

    adaptation_rate: AdaptationRate
    hessian_step: HessianStep

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Take the inner step by the meta-gradient."""
        adapted = add_scaled(x, grads, factor=-self.adaptation_rate)
        v = moment.gradient_at(adapted).grads
        direction = v
        if self.hessian_step is not None:
            ahead = moment.gradient_at(add_scaled(x, v, factor=self.hessian_step)).grads
            behind = moment.gradient_at(add_scaled(x, v, factor=-self.hessian_step)).grads
            scale = self.adaptation_rate / (2.0 * self.hessian_step)
            difference = add_scaled(ahead, behind, factor=-1.0)
            direction = add_scaled(v, difference, factor=-scale)
        self.inner.step(x, direction, memory, broadcast=broadcast, moment=moment)


@explain_calls
def PerFedAvg(
    local: Local,
    *,
    adaptation_rate: AdaptationRate,
    hessian_step: HessianStep = None,
    weight_by_examples: ByExamples = False,
) -> Algorithm:
    """Per-FedAvg: FedAvg of a model that clients adapt by one step, first order or Hessian-free.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> fl.PerFedAvg(local, adaptation_rate=0.05).local.adaptation_rate
        0.05

    References:
        Fallah, Mokhtari and Ozdaglar, 2020, `Personalized Federated Learning: A Meta-Learning
        Approach <https://arxiv.org/abs/2002.07948>`_, algorithm 1 and section 5. With a rate of 0
        it is FedAvg.
    """
    require_update(local, name="local")
    meta = MetaGradient(inner=local, adaptation_rate=adaptation_rate, hessian_step=hessian_step)
    return FedAvg(meta, weight_by_examples=weight_by_examples)
