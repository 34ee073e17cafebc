"""FedPer, FedBN and LG-FedAvg: FedAvg in which each client keeps some layers for itself.

They differ only in which layers. :class:`~fedlearn.algorithms.local_parts.KeepLocal` does the same
for any algorithm.
"""

from typing import Annotated, TypeAlias

from annotated_types import doc

from fedlearn.algorithms.local_parts import KeepLocal
from fedlearn.algorithms.recipes import ByExamples, FedAvg, Local
from fedlearn.core.calls import explain_calls

Patterns: TypeAlias = Annotated[
    tuple[str, ...],
    doc('Patterns of tensor names, such as "head.*", or of layer classes, "type:Conv*".'),
]


@explain_calls
def FedPer(
    local: Local, *, personal_layers: Patterns, weight_by_examples: ByExamples = True
) -> KeepLocal:
    """FedPer: clients share the base layers and keep the last ones, the personalization layers.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=4, batch_size=10, learning_rate=0.1)
        >>> fl.FedPer(local, personal_layers=["head.*"]).keep_local
        ('head.*',)

    References:
        Arivazhagan et al., 2019, `Federated Learning with Personalization Layers
        <https://arxiv.org/abs/1912.00818>`_, algorithms 1 and 2. As there, clients train the base
        and their own layers together.
    """
    shared = FedAvg(local, weight_by_examples=weight_by_examples)
    return KeepLocal(shared, personal_layers, named_by="personal_layers")


@explain_calls
def FedBN(local: Local, *, weight_by_examples: ByExamples = True) -> KeepLocal:
    """FedBN: clients keep BatchNorm layers, with their statistics, and share everything else.

    Example:
        >>> import fedlearn as fl
        >>> fl.FedBN(fl.LocalSgd(epochs=1, batch_size=10, learning_rate=0.1)).keep_local
        ('type:_BatchNorm',)

    References:
        Li et al., 2021, `FedBN: Federated Learning on Non-IID Features via Local Batch
        Normalization <https://arxiv.org/abs/2102.07623>`_, algorithm 1. As there, clients count
        by their numbers of examples unless ``weight_by_examples`` is false.
    """
    shared = FedAvg(local, weight_by_examples=weight_by_examples)
    return KeepLocal(shared, ("type:_BatchNorm",), named_by="FedBN")


@explain_calls
def LGFedAvg(
    local: Local, *, representation_layers: Patterns, weight_by_examples: ByExamples = True
) -> KeepLocal:
    """LG-FedAvg: clients keep the first layers, their representation, and share the last ones.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=1, batch_size=10, learning_rate=0.1)
        >>> fl.LGFedAvg(local, representation_layers=["body.*"]).keep_local
        ('body.*',)

    References:
        Liang et al., 2020, `Think Locally, Act Globally: Federated Learning with Local and Global
        Representations <https://arxiv.org/abs/2001.01523>`_, algorithm 1, without its optional
        auxiliary losses.
    """
    shared = FedAvg(local, weight_by_examples=weight_by_examples)
    return KeepLocal(shared, representation_layers, named_by="representation_layers")
