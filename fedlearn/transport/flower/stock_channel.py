"""The coordinator's side of Flower's own ClientApps: those written for a strategy of Flower's."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from flwr.app import Message, MessageType

from fedlearn.core.messages import ClientId, EvaluateRequest, Reply, Request
from fedlearn.errors import ProtocolError
from fedlearn.transport.flower.grid_channel import GridChannel, Question
from fedlearn.transport.flower.records import MAX_INTEGER
from fedlearn.transport.flower.stock_records import StockRecords


@dataclass(eq=False, kw_only=True)
class StockChannel(GridChannel):
    """Reaches the ClientApps of a federation that know nothing of fedlearn.

    Every node that is connected is a client, whose id is made of the node's. Nothing is signed: a
    reply is whose Flower says that it is.

    Attributes:
        records: What they are sent, and what is made of their replies.
    """

    records: StockRecords

    def _meet(self, nodes: set[int]) -> None:
        self._node_ids |= {ClientId(node_id & MAX_INTEGER): node_id for node_id in nodes}

    def _questions(
        self, requests: Mapping[ClientId, Request], *, expires_s: float
    ) -> dict[ClientId, Question]:
        # What is alike is one object here: its arrays are written, and the SuperLink keeps, once.
        contents = {
            id(request): self.records.content(request)
            for request in {id(each): each for each in requests.values()}.values()
        }
        return {
            client: Question(
                node_id=self._node_ids.get(client, 0),
                content=contents[id(request)],
                message_type=(
                    MessageType.EVALUATE
                    if isinstance(request, EvaluateRequest)
                    else MessageType.TRAIN
                ),
                expires_s=expires_s,
                read=partial(self._answer, client, request),
            )
            for client, request in requests.items()
        }

    def _answer(self, client: ClientId, request: Request, message: Message) -> Reply:
        sender = message.metadata.src_node_id
        if sender != self._node_ids[client]:
            raise ProtocolError(f"the reply is another node's: {sender}")
        return self.records.reply(message.content, request)
