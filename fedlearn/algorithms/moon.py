r"""MOON: a client's representations are pulled to the global model's, away from its last model's.

========================== ==========================================
symbol                     here
========================== ==========================================
:math:`R_w`                the output of the submodule ``representation``
:math:`z`                  representation by the client's model :math:`w`
:math:`z_{glob}`           by the global model
:math:`z_{prev}`           by the memory ``previous_model``
:math:`\tau, \mu`          ``temperature``, ``contrast``
========================== ==========================================

A client minimizes :math:`\ell_{sup} + \mu \ell_{con}` with

.. math::

    \ell_{con} = -\log \frac{e^{sim(z, z_{glob}) / \tau}}
    {e^{sim(z, z_{glob}) / \tau} + e^{sim(z, z_{prev}) / \tau}},

where :math:`sim` is the cosine similarity.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import torch
from annotated_types import doc
from torch import Tensor
from torch.nn import functional as F

from fedlearn.algorithms.lanes import Over
from fedlearn.algorithms.local import (
    MODEL,
    ClientBatch,
    ClientModel,
    LocalUpdateWrapper,
    Memory,
    MemorySpec,
    Moment,
    Tensors,
    keep_own_model,
    require_update,
)
from fedlearn.algorithms.recipes import Algorithm, ByExamples, FedAvg, Local
from fedlearn.core.calls import explain_calls
from fedlearn.core.ranges import NotNegative, Positive, Ranged

_PREVIOUS, _HAS_PREVIOUS = "previous_model", "has_previous_model"

Contrast: TypeAlias = Annotated[NotNegative, doc("Weight of the contrast, >= 0; 0: none.")]
Temperature: TypeAlias = Annotated[Positive, doc("Temperature of the contrast, > 0.")]
Representation: TypeAlias = Annotated[
    str,
    doc(
        "Name of the submodule that returns the representations, as in named_modules(), such as a "
        "projection before the last layer; empty: the model's outputs."
    ),
]


@dataclass(frozen=True, kw_only=True)
class ModelContrast(Ranged, LocalUpdateWrapper):
    """Adds MOON's contrast to the loss.

    Attributes:
        inner: Any local update.
        contrast: See :func:`MOON`, as for the others.
    """

    contrast: Contrast
    temperature: Temperature
    representation: Representation

    @property
    def memory(self) -> Mapping[str, MemorySpec]:
        """The inner update's, and the client's last local model."""
        return {
            **self.inner.memory,
            _PREVIOUS: MemorySpec(over=Over.TRAINABLE, is_kept=True),
            _HAS_PREVIOUS: MemorySpec(over=1, is_kept=True),
        }

    def begin(self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment) -> None:
        """Begin; a client without a last model contrasts the global one with itself, in vain."""
        self.inner.begin(x, memory, broadcast=broadcast, moment=moment)
        keep_own_model(memory, broadcast=broadcast, name=_PREVIOUS, flag=_HAS_PREVIOUS)

    def client_loss(
        self,
        model: ClientModel,
        batch: ClientBatch,
        *,
        memory: Memory,
        broadcast: Memory,
        moment: Moment,
    ) -> Tensor:
        """Return the objective's loss plus the contrast."""
        inputs, name = batch.features, self.representation
        outputs, z = model.with_output_of(name, inputs)
        _, z_glob = model.at(broadcast[MODEL]).with_output_of(name, inputs)
        _, z_prev = model.at(memory[_PREVIOUS]).with_output_of(name, inputs)
        similar, other = (
            F.cosine_similarity(z.flatten(1), each.flatten(1)) / self.temperature
            for each in (z_glob, z_prev)
        )
        # -log(e^a / (e^a + e^b)) = log(1 + e^(b - a))
        contrast = F.softplus(other - similar).mean()
        return batch.mean_loss(outputs) + self.contrast * contrast

    def report(
        self, x: Tensors, memory: Memory, *, broadcast: Memory, moment: Moment
    ) -> Mapping[str, Tensors]:
        """Keep the local model for the client's next round."""
        torch._foreach_copy_(list(memory[_PREVIOUS]), list(x))
        return self.inner.report(x, memory, broadcast=broadcast, moment=moment)


@explain_calls
def MOON(
    local: Local,
    *,
    contrast: Contrast,
    temperature: Temperature,
    representation: Representation,
    weight_by_examples: ByExamples = True,
) -> Algorithm:
    """MOON: FedAvg with a contrast between the client's, the global and the client's last model.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> moon = fl.MOON(local, contrast=1.0, temperature=0.5, representation="features")
        >>> [name for name, spec in moon.local.memory.items() if spec.is_kept]
        ['previous_model', 'has_previous_model']

    References:
        Li, He and Song, 2021, `Model-Contrastive Federated Learning
        <https://arxiv.org/abs/2103.16257>`_, algorithm 1. With a weight of 0 it is FedAvg.
    """
    require_update(local, name="local")
    if contrast:
        local = ModelContrast(
            inner=local,
            contrast=contrast,
            temperature=temperature,
            representation=representation,
        )
    return FedAvg(local, weight_by_examples=weight_by_examples)
