"""The coordinator's channel to ClientApps that were written for Flower's own strategies."""

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
    """Reaches ClientApps that know nothing of fedlearn.

    Every connected node is a client, whose id is derived from the node's. Nothing is signed:
    Flower's word for the sender of a reply is trusted.

    Attributes:
        records: Converts requests and replies to and from Flower's records.
    """

    records: StockRecords

    def _identify_nodes(self, nodes: set[int]) -> None:
        self._node_ids |= {ClientId(node_id & MAX_INTEGER): node_id for node_id in nodes}

    def _build_questions(
        self, requests: Mapping[ClientId, Request], *, expires_s: float
    ) -> dict[ClientId, Question]:
        # Clients with the same request share one content object, so that its arrays are encoded
        # once, and stored once in the SuperLink.
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
            raise ProtocolError(f"the reply is from another node: {sender}")
        return self.records.reply(message.content, request)
