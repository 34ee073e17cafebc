"""A client of a Flower federation: the session that answers everywhere else, as a ClientApp."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from fedlearn.client.session import ClientSession
from fedlearn.client.trainer import (
    LocalEvaluation,
    LocalResult,
    LocalTrainer,
    TaskControl,
    TrainContext,
)
from fedlearn.transport import flower
from fedlearn.transport.flower import Node
from fedlearn.transport.memory import Handler

__all__ = ["Node", "client_app"]


def client_app(make_trainer: Callable[[Node], LocalTrainer]) -> flower.ClientApp:
    """Return the Flower ClientApp of a client that trains with ``make_trainer``'s result.

    What the trainer returns as its state is kept from message to message in Flower's
    ``Context.state``, and lost with the SuperNode.

    Args:
        make_trainer: Returns the trainer of a node; called once a message, since Flower starts
            a process for each. An error in it reaches the coordinator only as the name of its
            type, as one in the trainer does.
    """

    def handler(node: Node) -> Handler:
        return ClientSession(node.client_id, _WhenAsked(node, make_trainer)).handle

    return flower.client_app(handler)


@dataclass(frozen=True)
class _WhenAsked:
    """A trainer that is made inside the session, whose errors tell nothing of the data."""

    node: Node
    make_trainer: Callable[[Node], LocalTrainer]

    def train(self, tensors: Mapping[str, Tensor], *, context: TrainContext) -> LocalResult:
        return self.make_trainer(self.node).train(tensors, context=context)

    def evaluate(self, tensors: Mapping[str, Tensor], *, control: TaskControl) -> LocalEvaluation:
        return self.make_trainer(self.node).evaluate(tensors, control=control)
