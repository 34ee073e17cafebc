r"""APFL: each client uses a mixture of the global model and its own.

========================== ==========================================
symbol                     here
========================== ==========================================
:math:`w_i`                a client's copy of the global model
:math:`v_i`                the memory ``personal``
:math:`\alpha_i`           ``mixing``; the memory ``mixing`` if it adapts
:math:`\bar v_i`           the mixture :math:`\alpha_i v_i + (1 - \alpha_i) w_i`
:math:`\eta`               ``personal_learning_rate``
========================== ==========================================

Each local step updates :math:`w_i` by the inner update, and on the same batch

.. math:: v_i \leftarrow v_i - \eta \alpha_i \nabla f_i(\bar v_i).

In the first step of a round, an adaptive weight moves before by the gradient of the same loss,

.. math:: \alpha_i \leftarrow \alpha_i - \eta \langle v_i - w_i, \nabla f_i(\bar v_i) \rangle,

and is clipped to [0, 1]. Only :math:`w_i` leaves the client.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

import torch
from annotated_types import doc
from torch import Tensor

from fedlearn.algorithms.ditto import PersonalRate
from fedlearn.algorithms.lanes import Over
from fedlearn.algorithms.local import (
    LocalUpdateWrapper,
    Memory,
    MemorySpec,
    Moment,
    Tensors,
    add_scaled,
    flatten_rows,
    keep_own_model,
    require_update,
    unsqueeze_like,
)
from fedlearn.algorithms.recipes import Algorithm, ByExamples, FedAvg, Local
from fedlearn.core.calls import explain_calls
from fedlearn.core.ranges import Probability, Ranged

_PERSONAL, _HAS_PERSONAL, _MIXING = "personal", "has_personal", "mixing"

Mixing: TypeAlias = Annotated[
    Probability, doc("Weight of the client's own model in the mixture, in [0, 1].")
]
AdaptsMixing: TypeAlias = Annotated[
    bool, doc("Let each client adapt its weight once a round; it starts at ``mixing``.")
]


@dataclass(frozen=True, kw_only=True)
class MixedModel(Ranged, LocalUpdateWrapper):
    """Trains a client's own model so that its mixture with the global one fits the client's data.

    The own model starts as the global model of the first round in which the client takes part.

    Attributes:
        inner: Any local update, for the global model.
        mixing: See :func:`APFL`, as for the others.
    """

    asks_gradients: ClassVar[bool] = True

    personal_learning_rate: PersonalRate
    mixing: Mixing
    adapts_mixing: AdaptsMixing

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        """The inner update's, the client's own model, and the weight if it adapts."""
        number = MemorySpec(over=1, is_kept=True)
        return {
            **self.inner.memory,
            _PERSONAL: MemorySpec(over=Over.TRAINABLE, is_kept=True),
            _HAS_PERSONAL: number,
            **({_MIXING: number} if self.adapts_mixing else {}),
        }

    def begin(self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment) -> None:
        """Begin the inner update, and the own model and the weight if there are none yet."""
        self.inner.begin(x, memory, broadcast=broadcast, moment=moment)
        if self.adapts_mixing:
            (weight,), (has_own,) = memory[_MIXING], memory[_HAS_PERSONAL]
            weight.copy_(torch.where(has_own > 0.0, weight, self.mixing))
        keep_own_model(memory, broadcast=broadcast, name=_PERSONAL, flag=_HAS_PERSONAL)

    def step(
        self, x: Tensors, grads: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> None:
        """Step both models on the same batch."""
        own, rate = list(memory[_PERSONAL]), self.personal_learning_rate * moment.rate
        mixed_grads = moment.gradient_at(self._mix(x, memory)).grads
        if self.adapts_mixing and moment.step == 0:
            away = flatten_rows(add_scaled(own, x, factor=-1.0))
            slope_K1 = (away * flatten_rows(mixed_grads)).sum(1, keepdim=True)
            memory[_MIXING][0].sub_(rate * slope_K1).clamp_(0.0, 1.0)
        weight_K = self._weight(x, memory)
        for value, grad in zip(own, mixed_grads, strict=True):
            value.sub_(rate * unsqueeze_like(weight_K, grad) * grad)
        self.inner.step(x, grads, memory, broadcast=broadcast, moment=moment)

    def personal(self, x: Tensors, memory: Memory) -> Tensors:
        """Return the mixture."""
        return self._mix(x, memory)

    def _mix(self, x: Tensors, memory: Memory) -> Tensors:
        weight_K = self._weight(x, memory)
        pairs = zip(x, memory[_PERSONAL], strict=True)
        return [torch.lerp(value, own, unsqueeze_like(weight_K, value)) for value, own in pairs]

    def _weight(self, x: Tensors, memory: Memory) -> Tensor:
        """Return each client's weight: [K], of the dtype of ``x``."""
        if self.adapts_mixing:
            return memory[_MIXING][0][:, 0].to(x[0])
        return x[0].new_full((len(x[0]),), self.mixing)


@explain_calls
def APFL(
    local: Local,
    *,
    personal_learning_rate: PersonalRate,
    mixing: Mixing,
    adapts_mixing: AdaptsMixing,
    weight_by_examples: ByExamples = False,
) -> Algorithm:
    """APFL: FedAvg, and each client uses a mixture of the global model and its own.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> apfl = fl.APFL(local, personal_learning_rate=0.1, mixing=0.25, adapts_mixing=True)
        >>> [name for name, spec in apfl.local.memory.items() if spec.is_kept]
        ['personal', 'has_personal', 'mixing']

    References:
        Deng, Kamani and Mahdavi, 2020, `Adaptive Personalized Federated Learning
        <https://arxiv.org/abs/2003.13461>`_, algorithm 1. As in the authors' code, the weight
        adapts once a round.
    """
    require_update(local, name="local")
    mixed = MixedModel(
        inner=local,
        personal_learning_rate=personal_learning_rate,
        mixing=mixing,
        adapts_mixing=adapts_mixing,
    )
    return FedAvg(mixed, weight_by_examples=weight_by_examples)
