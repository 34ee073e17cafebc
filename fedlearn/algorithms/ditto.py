r"""Ditto: next to the global model, each client trains a personal one that stays close to it.

========================== ==========================================
symbol                     here
========================== ==========================================
:math:`w^t`                the global model
:math:`v_k`                the memory ``personal``
:math:`\lambda`            ``personal_pull``
:math:`\eta`               ``personal_learning_rate``
========================== ==========================================

Each local step updates the copy of the global model by the inner update, and on the same batch

.. math:: v_k \leftarrow v_k - \eta \big(\nabla F_k(v_k) + \lambda (v_k - w^t)\big).

The personal model has no influence on the global one, and never leaves the client.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

import torch
from annotated_types import doc

from fedlearn.algorithms.lanes import Over
from fedlearn.algorithms.local import (
    MODEL,
    LocalUpdateWrapper,
    Memory,
    MemorySpec,
    Moment,
    Tensors,
    add_scaled,
    keep_own_model,
    require_update,
)
from fedlearn.algorithms.recipes import Algorithm, ByExamples, FedAvg, Local
from fedlearn.core.calls import explain_calls
from fedlearn.core.ranges import NotNegative, Positive, Ranged

_PERSONAL, _HAS_PERSONAL = "personal", "has_personal"

PersonalRate: TypeAlias = Annotated[Positive, doc("Step size of the personal model, > 0.")]
PersonalPull: TypeAlias = Annotated[
    NotNegative,
    doc("Pull of the personal model to the global one, >= 0; 0: clients train it alone."),
]


@dataclass(frozen=True, kw_only=True)
class PersonalModel(Ranged, LocalUpdateWrapper):
    """Trains a personal model next to the global one.

    It starts as the global model of the first round in which the client takes part.

    Attributes:
        inner: Any local update, for the global model.
        personal_learning_rate: See :func:`Ditto`, as for ``personal_pull``.
    """

    asks_gradients: ClassVar[bool] = True

    personal_learning_rate: PersonalRate
    personal_pull: PersonalPull

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        """The inner update's, and the personal model."""
        return {
            **self.inner.memory,
            _PERSONAL: MemorySpec(over=Over.TRAINABLE, is_kept=True),
            _HAS_PERSONAL: MemorySpec(over=1, is_kept=True),
        }

    def begin(self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment) -> None:
        """Begin the inner update, and the personal model if there is none yet."""
        self.inner.begin(x, memory, broadcast=broadcast, moment=moment)
        keep_own_model(memory, broadcast=broadcast, name=_PERSONAL, flag=_HAS_PERSONAL)

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Step both models on the same batch."""
        personal = list(memory[_PERSONAL])
        away = add_scaled(personal, broadcast[MODEL], factor=-1.0)
        direction = add_scaled(moment.gradient_at(personal).grads, away, factor=self.personal_pull)
        rate = self.personal_learning_rate * moment.rate
        torch._foreach_add_(personal, direction, alpha=-rate)
        self.inner.step(x, grads, memory, broadcast=broadcast, moment=moment)

    def personal(self, x: Tensors, memory: Memory) -> Tensors:
        """The client's own model."""
        return memory[_PERSONAL]


@explain_calls
def Ditto(
    local: Local,
    *,
    personal_learning_rate: PersonalRate,
    personal_pull: PersonalPull,
    weight_by_examples: ByExamples = True,
) -> Algorithm:
    """Ditto: FedAvg, with a personal model of each client that is pulled to the global one.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> ditto = fl.Ditto(local, personal_learning_rate=0.1, personal_pull=0.5)
        >>> ditto.local.memory["personal"].is_kept
        True

    References:
        Li et al., 2021, `Ditto: Fair and Robust Federated Learning Through Personalization
        <https://arxiv.org/abs/2012.04221>`_, algorithm 1, with as many personal steps as global
        ones.
    """
    require_update(local, name="local")
    personal = PersonalModel(
        inner=local, personal_learning_rate=personal_learning_rate, personal_pull=personal_pull
    )
    return FedAvg(personal, weight_by_examples=weight_by_examples)
