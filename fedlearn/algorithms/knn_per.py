r"""kNN-Per: each client corrects the global model by its own examples, without training.

========================== ==========================================
symbol                     here
========================== ==========================================
:math:`\phi_h(x)`          what the submodule ``representation`` returns
:math:`k`                  ``num_neighbors``
:math:`N_k(x)`             the client's training examples nearest to :math:`x`
:math:`\lambda_m`          ``neighbor_weight``
========================== ==========================================

A client predicts the class :math:`y` with probability

.. math::

    \lambda_m \frac{\sum_{i \in N_k(x)} 1_{y = y_i} e^{-d_i}}{\sum_{i \in N_k(x)} e^{-d_i}}
    + (1 - \lambda_m) h(x)_y, \qquad d_i = \|\phi_h(x) - \phi_h(x_i)\|,

where :math:`h` is the global model. An example is never its own neighbor.

Shape legend: E examples, N stored examples, C classes, D numbers in a representation.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple, TypeAlias

import torch
from annotated_types import doc
from torch import Tensor

from fedlearn.algorithms.local import (
    LocalUpdate,
    LocalUpdateWrapper,
    Memory,
    Tensors,
    iter_updates,
    require_update,
)
from fedlearn.algorithms.recipes import Algorithm, ByExamples, FedAvg, Local
from fedlearn.core.calls import explain_calls
from fedlearn.core.ranges import Count, Probability, Ranged

#: Examples whose distances to all stored ones are in memory at a time.
_AT_ONCE = 256

NeighborRepresentation: TypeAlias = Annotated[
    str,
    doc(
        "Name of the submodule whose outputs are compared, as in named_modules(), such as the last "
        "one before the head; empty: the model's outputs."
    ),
]
NumNeighbors: TypeAlias = Annotated[Count, doc("Nearest examples that vote, >= 1.")]
NeighborWeight: TypeAlias = Annotated[
    Probability, doc("Weight of the neighbors' vote, in [0, 1]; 0: the global model alone.")
]


class Represented(NamedTuple):
    """Examples as a model sees them.

    Attributes:
        outputs: Logits: [E, C].
        representations: [E, ...].
        labels: Classes: [E].
    """

    outputs: Tensor
    representations: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class NearestNeighbors(Ranged, LocalUpdateWrapper):
    """Lets a client's nearest training examples vote when its model is evaluated.

    Training is the inner update's.

    Attributes:
        inner: Any local update.
        representation: See :func:`KnnPer`, as for the others.
    """

    takes_flat: ClassVar[bool] = True

    representation: NeighborRepresentation
    num_neighbors: NumNeighbors
    neighbor_weight: NeighborWeight

    def personal(self, x: Tensors, memory: Memory) -> Tensors:
        """Return the inner update's personal model, or ``x``; :meth:`vote` corrects its outputs."""
        own = self.inner.personal(x, memory)
        return x if own is None else own

    def vote(self, examples: Represented, stored: Represented, *, is_same: bool) -> Tensor:
        """Return logarithms of the corrected probabilities, which are logits too: [E, C].

        Args:
            examples: What is predicted.
            stored: The client's training examples.
            is_same: Whether both are the same examples, so that each must not vote for itself.

        Raises:
            ValueError: The labels are not one class for each example.
        """
        logits, labels = examples.outputs, stored.labels
        if logits.dim() != 2 or labels.dim() != 1 or labels.is_floating_point():  # noqa: PLR2004 - [E, C]
            raise ValueError(
                "kNN-Per predicts one class for each example, but the outputs have shape "
                f"{tuple(logits.shape)} and the labels {tuple(labels.shape)}, {labels.dtype}; use "
                "it for classification"
            )
        parts = [
            self._vote(examples, stored, slice(begin, begin + _AT_ONCE), is_same=is_same)
            for begin in range(0, len(logits), _AT_ONCE)
        ]
        return torch.cat(parts) if parts else logits

    def _vote(
        self, examples: Represented, stored: Represented, part: slice, *, is_same: bool
    ) -> Tensor:
        probabilities_EC = examples.outputs[part].softmax(1)
        z_ED, stored_ND = (each.representations.flatten(1) for each in (examples, stored))
        # Not by a matrix product, which rounds small distances to zero.
        distances_EN = torch.cdist(
            z_ED[part], stored_ND, compute_mode="donot_use_mm_for_euclid_dist"
        )
        num_classes = probabilities_EC.shape[1]
        counts_N = (stored.labels >= 0) & (stored.labels < num_classes)  # others are ignored
        distances_EN[:, ~counts_N] = torch.inf
        if is_same:
            rows_E = torch.arange(len(distances_EN), device=distances_EN.device)
            distances_EN[rows_E, rows_E + part.start] = torch.inf
        k = min(self.num_neighbors, len(stored.labels))
        nearest_Ek, places_Ek = distances_EN.topk(k, largest=False)
        has_any_E1 = nearest_Ek[:, :1].isfinite()
        votes_Ek = torch.where(has_any_E1, (-nearest_Ek).softmax(1), 0.0)
        classes_Ek = stored.labels[places_Ek].clamp(0, num_classes - 1)
        shares_EC = torch.zeros_like(probabilities_EC).scatter_add_(1, classes_Ek, votes_Ek)
        weight_E1 = self.neighbor_weight * has_any_E1
        mixed_EC = weight_E1 * shares_EC + (1.0 - weight_E1) * probabilities_EC
        return mixed_EC.clamp(min=torch.finfo(mixed_EC.dtype).tiny).log()


def find_neighbors(local: LocalUpdate) -> NearestNeighbors | None:
    """Return the part of an update that lets neighbors vote, if there is one."""
    found = (each for each in iter_updates(local) if isinstance(each, NearestNeighbors))
    return next(found, None)


@explain_calls
def KnnPer(
    local: Local,
    *,
    representation: NeighborRepresentation,
    num_neighbors: NumNeighbors,
    neighbor_weight: NeighborWeight,
    weight_by_examples: ByExamples = True,
) -> Algorithm:
    """kNN-Per: FedAvg, and clients mix the global model with a vote of their nearest examples.

    Nothing is trained or sent for it, so it also serves clients that never took part. It shows in
    the personal metrics of the clients' evaluation.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> algorithm = fl.KnnPer(
        ...     local, representation="features", num_neighbors=10, neighbor_weight=0.5
        ... )
        >>> algorithm.local.num_neighbors
        10

    References:
        Marfoq, Neglia, Kameni and Vidal, 2022, `Personalized Federated Learning through Local
        Memorization <https://arxiv.org/abs/2111.09360>`_, equations 7 and 8. There, each client
        chooses its weight on validation examples; here all have the same. With a weight of 0 it is
        FedAvg.
    """
    require_update(local, name="local")
    remembering = NearestNeighbors(
        inner=local,
        representation=representation,
        num_neighbors=num_neighbors,
        neighbor_weight=neighbor_weight,
    )
    return FedAvg(remembering, weight_by_examples=weight_by_examples)
