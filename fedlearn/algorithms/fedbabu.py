r"""FedBABU: clients train only the body of the model; each fine-tunes the whole model for itself.

========================== ==========================================
symbol                     here
========================== ==========================================
:math:`\theta_{ext}`       the body: all parameters but the head
:math:`\theta_{cls}`       the head: parameters that match ``head_layers``
========================== ==========================================

In each round, clients train and send :math:`\theta_{ext}`, and :math:`\theta_{cls}` keeps its
initial values on all of them.
"""

from fedlearn.algorithms.fedrep import HeadLayers, HeadThenBody
from fedlearn.algorithms.local import require_update
from fedlearn.algorithms.local_parts import KeepLocal
from fedlearn.algorithms.name_patterns import join_patterns
from fedlearn.algorithms.recipes import ByExamples, FedAvg, Local
from fedlearn.core.calls import explain_calls


@explain_calls
def FedBABU(
    local: Local, *, head_layers: HeadLayers, weight_by_examples: ByExamples = True
) -> KeepLocal:
    """FedBABU: FedAvg of the body alone; the head keeps its initial values.

    The global model is a start for each client, which trains it for a few epochs, head included,
    before it uses it: set ``evaluation.fine_tune_epochs`` to measure that.

    Example:
        >>> import fedlearn as fl
        >>> local = fl.LocalSgd(epochs=2, batch_size=10, learning_rate=0.1)
        >>> fl.FedBABU(local, head_layers=["head.*"]).local.head_epochs
        0

    References:
        Oh, Kim and Yun, 2022, `FedBABU: Towards Enhanced Representation for Federated Image
        Classification <https://arxiv.org/abs/2106.06042>`_, algorithm 1.
    """
    require_update(local, name="local")
    patterns = join_patterns(head_layers, name="head_layers")
    body = HeadThenBody(inner=local, head=patterns, head_epochs=0)
    # The head is the same on all clients, so it need not travel.
    shared = FedAvg(body, weight_by_examples=weight_by_examples)
    return KeepLocal(shared, tuple(head_layers), named_by="head_layers")
