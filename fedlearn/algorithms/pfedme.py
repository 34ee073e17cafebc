r"""pFedMe: a client's model steps to a personal one that is optimal near it (Moreau envelopes).

========================== ==========================================
symbol                     here
========================== ==========================================
:math:`w_{i,r}`            a client's parameters in local step r
:math:`\theta_i`           the memory ``personal``
:math:`\lambda`            ``attachment``
:math:`K`                  ``personal_steps``
:math:`\eta`               the inner update's learning rate
:math:`\beta`              ``server_learning_rate``
========================== ==========================================

In a local step, the personal model starts at :math:`w_{i,r}` and takes K steps on the step's batch,

.. math::

    \theta_i \leftarrow \theta_i - \alpha \big(\nabla f_i(\theta_i) +
    \lambda (\theta_i - w_{i,r})\big), \qquad
    w_{i,r+1} = w_{i,r} - \eta \lambda (w_{i,r} - \theta_i),

where :math:`\alpha` is ``personal_learning_rate``. The second step is the inner update's. The
server moves by :math:`w \leftarrow (1 - \beta) w + \beta \overline{w_i}`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

import torch
from annotated_types import doc

from fedlearn.algorithms.ditto import PersonalRate
from fedlearn.algorithms.lanes import Over
from fedlearn.algorithms.local import (
    LocalUpdateWrapper,
    Memory,
    MemorySpec,
    Moment,
    Tensors,
    add_scaled,
    require_update,
)
from fedlearn.algorithms.recipes import Algorithm, ByExamples, FedAvgM, Local
from fedlearn.algorithms.server_optimizers import ServerRate
from fedlearn.core.calls import explain_calls
from fedlearn.core.ranges import Count, Positive, Ranged

_PERSONAL = "personal"

Attachment: TypeAlias = Annotated[
    Positive, doc("Strength with which personal and local model attract each other, > 0.")
]
PersonalSteps: TypeAlias = Annotated[
    Count, doc("Steps of the personal model in each local step, >= 1.")
]


@dataclass(frozen=True, kw_only=True)
class MoreauStep(Ranged, LocalUpdateWrapper):
    """Steps towards the personal model that minimizes the loss near the client's model.

    Attributes:
        inner: Any local update.
        attachment: See :func:`PFedMe`, as for the others.
    """

    asks_gradients: ClassVar[bool] = True

    attachment: Attachment
    personal_steps: PersonalSteps
    personal_learning_rate: PersonalRate

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        """The inner update's, and the personal model."""
        return {**self.inner.memory, _PERSONAL: MemorySpec(over=Over.TRAINABLE, is_kept=True)}

    def begin(self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment) -> None:
        """Begin both models at the same place."""
        self.inner.begin(x, memory, broadcast=broadcast, moment=moment)
        torch._foreach_copy_(list(memory[_PERSONAL]), list(x))

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Train the personal model from the client's, then step towards it."""
        personal, rate = list(memory[_PERSONAL]), self.personal_learning_rate * moment.rate
        torch._foreach_copy_(personal, list(x))
        # The first gradient is that at the client's model, where the attachment is zero.
        torch._foreach_add_(personal, list(grads), alpha=-rate)
        for _ in range(self.personal_steps - 1):
            further = moment.gradient_at(personal).grads
            away = add_scaled(personal, x, factor=-1.0)
            direction = add_scaled(further, away, factor=self.attachment)
            torch._foreach_add_(personal, direction, alpha=-rate)
        pull = add_scaled(x, personal, factor=-1.0)
        torch._foreach_mul_(pull, self.attachment)
        self.inner.step(x, pull, memory, broadcast=broadcast, moment=moment)

    def personal(self, x: Tensors, memory: Memory) -> Tensors:
        """The personal model of the last local step."""
        return memory[_PERSONAL]


@explain_calls
def PFedMe(
    local: Local,
    *,
    attachment: Attachment,
    personal_steps: PersonalSteps,
    personal_learning_rate: PersonalRate,
    server_learning_rate: ServerRate = 1.0,
    weight_by_examples: ByExamples = False,
) -> Algorithm:
    r"""pFedMe: personal models by Moreau envelopes.

    With one personal step, it is FedAvg at the learning rate :math:`\eta \lambda \alpha`.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.01)
        >>> pfedme = fl.PFedMe(
        ...     local, attachment=15.0, personal_steps=5, personal_learning_rate=0.05
        ... )
        >>> pfedme.local.memory["personal"].is_kept
        True

    References:
        Dinh, Tran and Nguyen, 2020, `Personalized Federated Learning with Moreau Envelopes
        <https://arxiv.org/abs/2006.08848>`_, algorithm 1.
    """
    require_update(local, name="local")
    moreau = MoreauStep(
        inner=local,
        attachment=attachment,
        personal_steps=personal_steps,
        personal_learning_rate=personal_learning_rate,
    )
    return FedAvgM(
        moreau,
        server_learning_rate=server_learning_rate,
        server_momentum=0.0,
        weight_by_examples=weight_by_examples,
    )
